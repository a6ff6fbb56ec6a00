"""Start the two programs, runs over tasks and commands on checkpoints; what they leave where they fail."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from mergekit_lab.commands import COMMANDS, load_command, refuse_unset
from mergekit_lab.errors import InputError
from mergekit_lab.failure import FILE, remove_failure, write_failure

log = logging.getLogger(__name__)
_RESULTS = ("records.jsonl", "analysis", "diagnosis.json")
"""The results that programs write into their folders."""


def load_torch_ahead() -> Thread | None:
    """Load torch's shared libraries in the background while a configuration is composed.

    This takes a fifth of torch's import, which begins with the same libraries in the same order. Nothing is
    loaded ahead on a machine with an NVIDIA driver: there may be several copies of CUDA's libraries, and torch
    chooses among them. Errors are left to the import.

    Returns:
        The thread, or None if nothing is loaded ahead.
    """
    left = sys.platform != "linux" or "torch" in sys.modules or Path("/proc/driver/nvidia").exists()
    torch = None if left else find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    folder = Path(torch.origin).parent / "lib"
    load = ctypes.CDLL(None).dlopen  # unlike an import, this call releases the interpreter's lock
    load.restype = ctypes.c_void_p

    def load_all() -> None:
        if load(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL):
            load(os.fsencode(folder / "libtorch_python.so"), os.RTLD_NOW)

    thread = Thread(target=load_all, name="load torch")  # no daemon: exiting while it loads would crash
    thread.start()
    return thread


def start(cfg: DictConfig, folder: Path, choices: Mapping[str, str], overrides: list[str]) -> float | None:
    """Start the program that a configuration is for.

    Args:
        cfg: the composed configuration; its `command` names a command, and a run has none.
        folder: where results outside the store go.
        choices: the option chosen in each group.
        overrides: as on the command line; written next to the error if the program fails.

    Returns:
        What a run returns to a sweeper.

    Raises:
        InputError: a user's mistake. It is written to `failure.json`, unless the folder holds results of an
            earlier run, or would be created only for this file under Hydra's default name.
    """
    with leave_failures(cfg, folder, overrides):
        if cfg.get("command") in COMMANDS:
            if not any(each.startswith("+") for each in overrides):  # a mistyped key may have become +key
                refuse_unset(cfg)
            with _pause_garbage_collection():
                command = load_command(cfg.command)
            command(cfg, folder)
            return None
        with _pause_garbage_collection():
            from mergekit_lab.runs.entry import execute
        return execute(cfg, folder, choices, overrides)


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Around imports: they make 180,000 objects that stay, and collecting among these takes a tenth of the
    time."""
    gc.disable()
    yield
    gc.enable()


@contextmanager
def leave_failures(cfg: DictConfig, folder: Path, overrides: list[str]) -> Iterator[None]:
    """Write `failure.json` and the configuration into the folder of a program that fails."""
    finished = _holds_results(folder) and not _is_in_sweep()
    try:
        remove_failure(folder)
        yield
    except Exception as error:
        if finished and isinstance(error, InputError):
            remove_failure(folder)
            log.warning("%s keeps the results of an earlier run", folder)
            raise
        if isinstance(error, InputError) and not (folder / FILE).exists() and _is_unnamed(folder):
            raise  # nothing was done yet, and nobody would look into this folder
        with suppress(OSError):  # the disk may be what failed
            write_failure(folder, overrides, f"{type(error).__name__}: {error}")
            (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
        explained = None if isinstance(error, InputError) else _explain_disk_error(error, folder)
        if explained is None:
            raise
        raise explained from error


def _explain_disk_error(error: Exception, folder: Path) -> InputError | None:
    """What to do if the run's folder is full or cannot be written; None for other errors."""
    from mergekit_lab.store.store import is_full

    if is_full(error):
        return InputError(
            f"no room for more in the run's folder {folder} ({error}): free some, or set run_dir=PATH; what "
            "was finished is in the store, and the same command finds it there"
        )
    if not isinstance(error, OSError):
        return None
    path = Path(error.filename2 or error.filename or "/")
    if not path.is_relative_to(folder):
        return None
    return InputError(f"{path} cannot be written ({error.strerror}): move it away, or set run_dir=PATH")


def _holds_results(folder: Path) -> bool:
    """Whether an earlier program finished here."""
    return any((folder / name).exists() for name in _RESULTS) and not (folder / FILE).exists()


def _is_unnamed(folder: Path) -> bool:
    """Whether Hydra made the folder, under its default name."""
    if not HydraConfig.initialized() or _is_in_sweep():
        return False
    settings = HydraConfig.get()
    texts: Any = OmegaConf.to_container(settings.overrides, resolve=False)
    overrides = [*texts["task"], *texts["hydra"]]
    is_made = not OmegaConf.is_missing(settings.runtime, "output_dir")
    folder_of_hydra = settings.runtime.output_dir if is_made else None
    is_named = any(each.lstrip("+").split("=")[0] in ("run_dir", "hydra.run.dir") for each in overrides)
    return folder_of_hydra == str(folder) and not is_named


def _is_in_sweep() -> bool:
    """Whether this is a job of a sweep. A sweep would take results that lie in the folder for the job's own."""
    return HydraConfig.initialized() and not OmegaConf.is_missing(HydraConfig.get().job, "num")
