"""A run or a sweep whose folder cannot be written is refused before Hydra writes there."""

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
    """Asks before any work; by SystemExit, for Hydra makes a warning of what else a callback raises."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        _refuse(Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        if not config.get("dry_run"):
            _refuse(Path(config.hydra.sweep.dir))


def _refuse(folder: Path) -> None:
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
        with suppress(OSError):
            folder.rmdir()
