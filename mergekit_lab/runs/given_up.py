"""Word of what could not be made for one job of a sweep, so that no other job of it tries again.

It is a folder of the sweep's own, whose name the jobs have from their environment, and that is there while the
sweep goes on: a later sweep tries again, and so does another one that shares the folder of its jobs.
"""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

SHARED = "training"
"""The folder, beside those of a sweep's jobs, of the trainings that they share."""
KINDS = ("experts", "fits", "joint", "fishers", "grams")
"""What is tried once a sweep: what takes long, and what many jobs share."""
PLACE = "MERGEKIT_LAB_GIVEN_UP"
"""The variable that names the folder to the jobs."""


def new_place(sweep: Path) -> Path:
    """A folder for a sweep that begins in this one; it is made when there is something to say."""
    return sweep.absolute() / SHARED / f"given_up-{uuid.uuid4().hex[:12]}"


def forget(place: Path) -> None:
    """At the end of its sweep."""
    shutil.rmtree(place, ignore_errors=True)


def give_up(name: str, reason: str, place: Path | None = None) -> None:
    """Leave word that something could not be made; the first word stays.

    Args:
        name: `KIND-KEY`.
        reason: what jobs that need it are to say.
        place: of the sweep; None for that of this process, and nothing happens outside of a sweep.
    """
    place = place or _mine()
    if place is None or (place / name).exists():
        return
    with suppress(OSError):  # the disk may be what failed
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(reason)


def given_up(name: str) -> str | None:
    """What `give_up` left in the sweep that this process works for."""
    place = _mine()
    try:
        return (place / name).read_text() if place else None
    except OSError:
        return None


def _mine() -> Path | None:
    named = os.environ.get(PLACE)
    return Path(named) if named else None
