"""A run or a sweep whose folder cannot be written, or is another's, is refused before Hydra writes there."""

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

_WRITE_ELSEWHERE = ("merge_checkpoints", "expand")
_WITHOUT_FOLDER = ("store", "fetch")
_ROOM = 1 << 20
"""Bytes that must fit: a log, records, and a page with small figures."""


class RunFolder(Callback):
    """Checks the folder before any work. It raises SystemExit, because Hydra turns other errors into warnings.

    The folder is locked until the process ends. Two processes that write there would mix their records.
    """

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        if _leaves_nothing(config) and not _is_named(config):
            config.hydra.run.dir = tempfile.mkdtemp()
            atexit.register(shutil.rmtree, config.hydra.run.dir, ignore_errors=True)
            return
        _take(Path(config.hydra.run.dir), named=_is_named(config))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        if not config.get("dry_run"):
            _take(Path(config.hydra.sweep.dir), named=True)


def _leaves_nothing(config: DictConfig) -> bool:
    """Whether this has no results, or writes them elsewhere, as a merge does."""
    stage = config.get("stage")
    return bool(config.get("command") in _WRITE_ELSEWHERE or config.get("dry_run") or stage in _WITHOUT_FOLDER)


def _is_named(config: DictConfig) -> bool:
    """Whether the user named the folder."""
    said: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)  # texts, with their `${…}`
    overrides = [*said["task"], *said["hydra"]]
    return any(each.lstrip("+").split("=")[0] in ("run_dir", "hydra.run.dir") for each in overrides)


def _take(folder: Path, named: bool) -> None:
    """Make and lock the folder, or refuse it. At the end it is removed if it is empty."""
    there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SystemExit(
            f"the run's folder {folder} cannot be written ({error.strerror}): set run_dir=PATH"
        ) from None
    if not there:
        atexit.register(remove_empty, folder, named)
    _lock(folder)


def _lock(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY)  # never closed: the lock is the process's
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(
            f"another run or sweep is writing to {folder}: wait until it ends, or set run_dir=PATH"
        ) from None
    except OSError:  # a file system that does not lock folders, as NFS
        os.close(held)


def remove_empty(folder: Path, named: bool) -> None:
    """Remove an empty folder; one that the user did not name, also if it has only a log."""
    with suppress(OSError):
        if not named and {file.name for file in folder.iterdir()} <= {"log.txt", ".hydra"}:
            shutil.rmtree(folder)
            folder.parent.rmdir()  # if it was the only one
        else:
            folder.rmdir()
