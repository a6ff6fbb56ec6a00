"""Load modules of Triton kernels, if Triton, a compiler and the GPU work together."""

import logging
from functools import cache
from importlib import import_module
from typing import Any

from mergekit_lab.errors import say_error

log = logging.getLogger(__name__)


@cache
def load_kernels(module: str, without: str) -> Any:
    """A module of kernels, if its `probe` succeeds on this GPU; else None, with a warning.

    Args:
        module: its full name; importing it needs Triton.
        without: how the warning begins: what does the work instead.
    """
    try:
        kernels = import_module(module)
        kernels.probe()
    except Exception as error:  # no Triton, no compiler, or a GPU that Triton does not support
        log.warning("%s, which takes longer (%s: %s)", without, type(error).__name__, say_error(error))
        return None
    return kernels
