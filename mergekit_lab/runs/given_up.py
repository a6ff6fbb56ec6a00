"""Word of what could not be made for one job of a sweep, so that no other job of it tries again.

It lies in a folder of the sweep's own, whose name its jobs have from their environment. The folder is there
while the sweep goes on, which removes it at its end: a later sweep tries again, and so does another one that
shares the folder of its jobs.
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
    """A folder for a sweep that begins in this one; it is made when there is something to say."""
    return sweep.absolute() / SHARED / f"given_up-{uuid.uuid4().hex[:12]}"


def give_up(name: str, reason: str, folder: Path | None = None) -> None:
    """Leave word that something could not be made; the first word stays.

    Args:
        name: `KIND-KEY`.
        reason: what jobs that need it are to say.
        folder: of the sweep; None for that of this process, and nothing happens outside of a sweep.
    """
    folder = folder or _find_own_folder()
    if folder is None or (folder / name).exists():
        return
    with suppress(OSError):  # the disk may be what failed
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(reason)


def read_reason(name: str) -> str | None:
    """What `give_up` left in the sweep that this process works for."""
    folder = _find_own_folder()
    try:
        return (folder / name).read_text() if folder else None
    except OSError:
        return None


def _find_own_folder() -> Path | None:
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None
