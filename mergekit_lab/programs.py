"""The programs, runs over tasks and commands on checkpoints: how they start and what they leave on failure."""

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
"""What programs leave in their folders for others to read."""


def load_torch_ahead() -> Thread | None:
    """Load torch's libraries in the background, a fifth of its import, while a configuration is composed.

    They are those that its import begins with, in its order; what cannot be loaded is left to that. So is all
    where there is an NVIDIA driver: of CUDA's libraries there may be several copies, and torch chooses.

    Returns:
        The thread; None where nothing is loaded ahead.
    """
    left = sys.platform != "linux" or "torch" in sys.modules or Path("/proc/driver/nvidia").exists()
    torch = None if left else find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    folder = Path(torch.origin).parent / "lib"
    load = ctypes.CDLL(None).dlopen  # called so, it does not hold the interpreter's lock, as an import does
    load.restype = ctypes.c_void_p

    def load_all() -> None:
        if load(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL):
            load(os.fsencode(folder / "libtorch_python.so"), os.RTLD_NOW)

    thread = Thread(target=load_all, name="load torch")  # no daemon: an exit amid loading would crash
    thread.start()
    return thread


def start(cfg: DictConfig, folder: Path, choices: Mapping[str, str], overrides: list[str]) -> float | None:
    """Start the program that a configuration is for.

    Args:
        cfg: the composed configuration; its `command` names a command, and a run has none.
        folder: where results go that are not in the store.
        choices: the option taken of each group.
        overrides: as on the command line; kept beside the error if the program fails.

    Returns:
        What a run returns to a sweeper.

    Raises:
        InputError: a user's mistake. `failure.json` says so, with two exceptions: results of an earlier run
            stay as they are, and a folder that nobody named is not created for it.
    """
    with leave_failures(cfg, folder, overrides):
        if cfg.get("command") in COMMANDS:
            if not any(each.startswith("+") for each in overrides):  # such a key may be what is mistyped
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
    """For imports: they leave 180,000 objects that stay, and looking for garbage among them takes a tenth
    longer."""
    gc.disable()
    yield
    gc.enable()


@contextmanager
def leave_failures(cfg: DictConfig, folder: Path, overrides: list[str]) -> Iterator[None]:
    """Leave `failure.json` and the configuration where the program fails."""
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
            raise  # before any work, in a folder that nobody would look into
        with suppress(OSError):  # the disk may be what failed
            write_failure(folder, overrides, f"{type(error).__name__}: {error}")
            (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
        explained = None if isinstance(error, InputError) else _explain_disk_error(error, folder)
        if explained is None:
            raise
        raise explained from error


def _explain_disk_error(error: Exception, folder: Path) -> InputError | None:
    """What to do where the run's folder has no room or cannot be written. None of other errors."""
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
    """Whether an earlier program came to its end here."""
    return any((folder / name).exists() for name in _RESULTS) and not (folder / FILE).exists()


def _is_unnamed(folder: Path) -> bool:
    """Whether Hydra made the folder, under the name that it has by default."""
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
    """Whether this is a job of a sweep: there what lies in the folder would pass for the job's own."""
    return HydraConfig.initialized() and not OmegaConf.is_missing(HydraConfig.get().job, "num")
