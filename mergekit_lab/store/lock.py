"""A lock that needs only an atomic rename, and is released if its holder dies.

A lock is a folder with one file in it: the holder's mark, which has a unique name. A holder makes the folder
under another name and then renames it. A rename onto a folder that is not empty fails, on local disks and on
NFS alike. So only one of several processes succeeds.

The holder touches its mark every few seconds. A waiter takes the lock for abandoned when the mark's time has
stood still for `stale_after` seconds of the waiter's own monotonic clock, so hosts may have different clocks.
If the holder was a process of this host and has ended, the waiter does not wait. It then deletes the mark by
its name, which is never the mark of a later holder.

`filelock.SoftFileLease` is not used. It takes a lock over by exchanging two names, which NFS cannot do. There a
lock whose holder died would stay forever, and so would one that a kill or a power cut left empty.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mergekit_lab.errors import InputError
from mergekit_lab.owners import has_ended, identify_process
from mergekit_lab.store.files import discard, read_file

log = logging.getLogger(__name__)

_FORGOTTEN = 3600.0
"""Seconds without a sign of life, by the file system's clock, after which leftovers among locks are removed."""
_PATIENCE = 5.0
"""Seconds of waiting before a log says so. Workers that share artifacts often wait for a moment."""
_MARK_BYTES = 1 << 12
_POLL = 0.05
"""Seconds between a waiter's first two looks. Later looks are less frequent."""


class FolderLock:
    """A lock that is held inside `with`. Of all processes that see the file system, one holds it at a time.

    Args:
        path: of the lock; its parent must exist.
        what: names what is locked, for messages.
        stale_after: seconds without a sign of life from its holder after which a lock counts as abandoned.

    Raises:
        InputError: the path is no folder.
        OSError: the file system refuses, e.g. it is read-only or full.
    """

    def __init__(self, path: Path, what: str, *, stale_after: float = 60.0) -> None:
        self.path = path
        self.what = what
        self.stale_after = stale_after
        self._mark = path / uuid.uuid4().hex
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FolderLock:
        begun = since = time.monotonic()
        seen: dict[str, _Mark] = {}
        waits = False
        while not self._take():
            now = time.monotonic()
            if not waits and now - begun > _PATIENCE:
                log.info("another process makes %s; waiting for it", self.what)
                waits = True
            marks = _read_marks(self.path)
            if marks != seen:
                seen, since = marks, now
            if dead := [name for name, mark in marks.items() if mark.is_dead]:
                log.warning("the lock of %s was left by a process that is gone", self.what)
                _delete(self.path, dead)
            elif now - since > self.stale_after:
                log.warning("the lock of %s shows no sign of life for %.0f s", self.what, now - since)
                _delete(self.path, marks)
            time.sleep(min(1.0, _POLL * (1 + (now - begun))))
        self._thread = threading.Thread(target=self._keep_touching, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):
            self._mark.unlink()
            self.path.rmdir()

    @property
    def held(self) -> bool:
        """Whether this lock is still held: nobody took it for abandoned."""
        return os.path.exists(self._mark)

    def clear_around(self) -> None:
        """Remove what killed processes left next to this lock, which must be held.

        That is a lock that nobody asks for again, because its artifact was published before the kill, or one
        that was not renamed yet. Each is a folder that would stay forever.
        """
        with suppress(OSError):
            now = self._mark.stat().st_mtime
            for path in self.path.parent.iterdir():
                with suppress(OSError):
                    _clear(path, now)

    def _take(self) -> bool:
        mine = self.path.with_name(f".{self.path.name}-{self._mark.name}")
        try:
            with suppress(FileNotFoundError):
                if os.listdir(self.path):
                    return False
            mine.mkdir()
            (mine / self._mark.name).write_text(json.dumps(identify_process()))
            mine.rename(self.path)
        except NotADirectoryError:
            raise InputError(
                f"the store keeps a lock at {self.path}, which is not a folder: delete it"
            ) from None
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        finally:
            discard(mine)
        return True

    def _keep_touching(self) -> None:
        while not self._ended.wait(min(5.0, self.stale_after / 6)):
            try:
                os.utime(self._mark)
            except FileNotFoundError:
                log.warning(
                    "the lock of %s was taken over by another process: was this one suspended?", self.what
                )
                return
            except OSError as error:  # what is refused now may be granted in a while
                log.warning("the lock of %s cannot be kept (%s)", self.what, error)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock at this path, as far as can be said at once."""
    try:
        return any(not mark.is_dead for mark in _read_marks(path).values())
    except OSError:
        return False


class _Mark(NamedTuple):
    """What a holder leaves in its lock: who it is, and when it last was known to live."""

    touched: int
    text: bytes

    @property
    def is_dead(self) -> bool:
        try:
            owner = json.loads(self.text)
        except (ValueError, RecursionError):
            return False
        return isinstance(owner, dict) and has_ended(owner)


def _read_marks(path: Path) -> dict[str, _Mark]:
    """What lies in a lock, by name; anything else than a mark is one that says of no owner."""
    marks = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(path):
            text = b""
            with suppress(OSError):  # opening it makes NFS ask its server for the file's time anew
                text = read_file(path / name, _MARK_BYTES)
            with suppress(FileNotFoundError):
                marks[name] = _Mark(os.lstat(path / name).st_mtime_ns, text)
    return marks


def _delete(path: Path, names: Iterable[str]) -> None:
    for name in names:
        try:
            (path / name).unlink(missing_ok=True)
        except IsADirectoryError:
            discard(path / name)


def _clear(path: Path, now: float) -> None:
    marks = _read_marks(path)
    latest = max([path.stat().st_mtime, *(mark.touched / 1e9 for mark in marks.values())])
    gone = list(marks) if now - latest > _FORGOTTEN else [name for name, mark in marks.items() if mark.is_dead]
    if not path.name.startswith("."):
        _delete(path, gone)
        path.rmdir()  # which fails where it is held
    elif gone or now - latest > _FORGOTTEN:
        discard(path)
