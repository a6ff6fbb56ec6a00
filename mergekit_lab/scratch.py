"""One folder for this program's temporary files, so that the leftovers of killed processes can be removed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

from mergekit_lab.owners import has_ended, identify_process

_OWNER = "owner.json"
_LAST = -1000
_LONGEST = 60
"""Bytes of the folder's path at most: sockets lie in it, and their paths may have about a hundred."""
_FORGOTTEN = 3600.0
"""Seconds after which a folder without an owner file is removed. A live process writes that file at once."""


def gather_temporary_files() -> None:
    """Put this process's temporary files into one folder, and remove those of processes that were killed.

    The folder is removed when this process ends. If it cannot be made, temporary files go to the usual place.
    """
    above = Path(tempfile.gettempdir(), f"mergekit_lab-{os.getuid()}")
    if len(os.fsencode(above)) > _LONGEST:
        return
    try:
        above.mkdir(mode=0o700, exist_ok=True)
        state = above.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
            return
        for folder in above.iterdir():
            if _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)
        mine = Path(tempfile.mkdtemp(prefix="", dir=above))
        (mine / _OWNER).write_text(json.dumps(identify_process()))
    except OSError:
        return
    # the lowest priority, because multiprocessing still removes files of its own there at exit
    Finalize(None, shutil.rmtree, (mine,), {"ignore_errors": True}, exitpriority=_LAST)
    tempfile.tempdir = str(mine)


def _is_left(folder: Path) -> bool:
    try:
        owner = json.loads((folder / _OWNER).read_text())
        return isinstance(owner, dict) and has_ended(owner)
    except (OSError, ValueError):
        with suppress(OSError):
            return time.time() - folder.stat().st_mtime > _FORGOTTEN
        return False
