"""Kernels in Triton, where Triton, a compiler and the GPU go together."""

import logging
from functools import cache
from importlib import import_module
from typing import Any

from mergekit_lab.errors import say_error

log = logging.getLogger(__name__)


@cache
def load_kernels(module: str, without: str) -> Any:
    """A module of kernels whose `probe` comes out on this GPU; else None, and a warning.

    Args:
        module: its full name; importing it needs Triton.
        without: what is done without it, and how.
    """
    try:
        kernels = import_module(module)
        kernels.probe()
    except Exception as error:  # Triton is not there, or has no compiler, or does not know this GPU
        log.warning("%s, which takes longer (%s: %s)", without, type(error).__name__, say_error(error))
        return None
    return kernels
