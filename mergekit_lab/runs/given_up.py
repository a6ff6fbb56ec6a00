"""Remember what one job of a sweep failed to make, so that the sweep's other jobs do not try it again.

Failures are files in a folder of the sweep. Its jobs find the folder by an environment variable. The sweep
removes it at its end, so a later sweep tries again.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

SHARED = "training"
"""The folder, beside those of a sweep's jobs, of the trainings that they share."""
VARIABLE = "MERGEKIT_LAB_GIVEN_UP"
"""The environment variable that names the folder to the jobs."""


def name_folder(sweep: Path) -> Path:
    """A new folder for the failures of a sweep in this folder. The first failure creates it."""
    return sweep.absolute() / SHARED / f"given_up-{uuid.uuid4().hex[:12]}"


def give_up(name: str, reason: str, folder: Path | None = None) -> None:
    """Record that an artifact could not be made. An earlier record stays.

    Args:
        name: `KIND-KEY`.
        reason: the error message of jobs that need it.
        folder: of the sweep's failures. None takes that of this process, and does nothing outside a sweep.
    """
    folder = folder or _find_own_folder()
    if folder is None or (folder / name).exists():
        return
    with suppress(OSError):  # the disk may be what failed
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(reason)


def read_reason(name: str) -> str | None:
    """The reason that `give_up` recorded in this process's sweep; None if there is none."""
    folder = _find_own_folder()
    try:
        return (folder / name).read_text() if folder else None
    except OSError:
        return None


def _find_own_folder() -> Path | None:
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None
