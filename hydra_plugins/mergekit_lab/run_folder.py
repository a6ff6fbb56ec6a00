"""A run or a sweep whose folder cannot be written, or is another's, is refused before Hydra writes there."""

import atexit
import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

_ROOM = 1 << 20
"""Bytes that must fit: a log, records, and a page with small figures."""


class RunFolder(Callback):
    """Asks before any work; by SystemExit, for Hydra makes a warning of what else a callback raises.

    The folder stays this process's until it ends, however it ends: of two that write there at once, each would
    read the other's records as its own.
    """

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        _take(Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        if not config.get("dry_run"):
            _take(Path(config.hydra.sweep.dir))


def _take(folder: Path) -> None:
    """Make the folder this process's, or refuse it."""
    there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SystemExit(
            f"the folder {folder} of what this run leaves cannot be written ({error.strerror}): set "
            "run_dir=PATH"
        ) from None
    if not there:  # what is refused for another reason leaves nothing
        atexit.register(_remove_empty, folder)
    _lock(folder)


def _lock(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY)  # never closed: the lock is the process's
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(
            f"another run or sweep is writing to {folder}: wait for its end, or set run_dir=PATH"
        ) from None
    except OSError:  # a file system that does not lock folders, as NFS
        os.close(held)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
