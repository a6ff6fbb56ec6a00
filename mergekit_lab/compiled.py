"""Models compiled by `torch.compile`: for training, once for all experts of one shape, and for evaluation."""

import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mergekit_lab.errors import say_error
from mergekit_lab.paths import find_compiler_cache

log = logging.getLogger(__name__)

PAYS_FROM = 5000
"""Steps from which `training.compile=auto` compiles. Compiling takes 30 to 80 s the first time, and saves 5 to
30 ms a step."""
_LARGE = 10**7
"""Parameters from which `training.compile=auto` compiles. Steps of smaller models are too short to gain."""

_OPTIONS: dict[str, Any] = {"fallback_random": True}
"""Dropout draws the same numbers as in the uncompiled model."""


def is_worthwhile(device: torch.device, steps: int, model: nn.Module) -> bool:
    """What `training.compile=auto` decides, by kind of device, number of steps and model size."""
    large = sum(p.numel() for p in model.parameters()) >= _LARGE
    return device.type == "cuda" and steps >= PAYS_FROM and large and _has_compiler()


def _has_compiler() -> bool:
    """Whether kernels can be built here: Triton builds them, and a C compiler what launches them."""
    from torch.utils._triton import has_triton

    return bool(has_triton()) and any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))


def compile_model(model: nn.Module, use: Callable[[nn.Module], object], setting: str) -> nn.Module:
    """Compile `model`, sharing its parameters. If that fails, log it and return `model` itself.

    Args:
        model: its parameters, gradients and buffers stay as they are.
        use: calls a model as it will be called later. It is called once, which compiles the model now.
        setting: the name of the user's setting, such as "training.compile".
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(find_compiler_cache()))
    log.info("compiling the model: half a minute to two minutes, or seconds if it was compiled before")
    begun = time.monotonic()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own code warns while it compiles
            compiled: nn.Module = torch.compile(model, options=_OPTIONS)  # type: ignore[assignment]
            use(compiled)
    except Exception as error:
        log.warning("%s: the model cannot be compiled and runs as written (%s)", setting, say_error(error))
        return model
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
    log.info("compiled in %.1f s", time.monotonic() - begun)
    return compiled


def end_compilers() -> None:
    """End torch's compiler processes in the background: at exit, torch would wait for them."""
    compilers = sys.modules.get("torch._inductor.async_compile")
    pools = list(getattr(compilers, "_pool_set", ()))
    if compilers is not None and pools:
        compilers.after_fork()  # torch forgets them, and starts others if something is compiled later

        def end() -> None:
            for pool in pools:
                pool.shutdown()

        threading.Thread(target=end, daemon=True).start()
