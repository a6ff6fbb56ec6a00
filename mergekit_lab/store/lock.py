"""A lock that needs no more of a file system than an atomic rename, and that outlives no holder.

A lock is a folder that comes to its name by a rename; a rename onto a folder that holds something fails, on
local disks and on NFS alike, so of several that try one succeeds. The holder counts in the file `beat`. A
waiter takes a lock for abandoned when the count stood still for `stale_after` seconds of the waiter's own
monotonic clock, so clocks that differ between hosts decide nothing; at once, when the holder was a process of
this host that is no more. An abandoned lock is renamed away under a lock of its own, by one waiter, who looks
again before it does.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

_OWNER, _BEAT = "owner.json", "beat"
_GONE = "-gone"
_FORGOTTEN = 3600.0
"""Seconds without a sign of life, by the file system's own clock, after which what lies among locks may go."""
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)


class FolderLock:
    """Held inside `with`; one holder at a time among all processes that see the file system.

    Args:
        path: of the lock; its parent must exist.
        what: of what it is, for messages.
        stale_after: seconds without a beat of its holder after which a lock counts as abandoned.
        poll: seconds between two looks of a waiter.

    Raises:
        OSError: the file system refuses, e.g. it is read-only or full.
    """

    def __init__(self, path: Path, what: str, *, stale_after: float = 60.0, poll: float = 0.1) -> None:
        self.path = path
        self.what = what
        self.stale_after = stale_after
        self.poll = poll
        self.token = uuid.uuid4().hex
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FolderLock:
        began, told = time.monotonic(), False
        seen: tuple[Any, Any] = (None, None)
        since = began
        while not self._take():
            now = time.monotonic()
            if not told and now - began > 0.5:
                log.info("waiting for the process that makes %s", self.what)
                told = True
            owner, beat = self._read()
            if (owner.get("token"), beat) != seen:
                seen, since = (owner.get("token"), beat), now
            if now - since > self.stale_after or _is_dead(owner):
                self._recover(owner.get("token"))
                since = time.monotonic()
            time.sleep(min(1.0, self.poll * (1 + (now - began))))
        self._thread = threading.Thread(target=self._keep_beating, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self.held:
            self._remove(self.path)

    @property
    def held(self) -> bool:
        """Whether nobody has taken this lock for abandoned."""
        return bool(self._read()[0].get("token") == self.token)

    def clear_around(self) -> None:
        """Remove what processes that were killed left beside this lock, which is held.

        A lock that nobody asks for again (the kill came after its artifact was published), one that was on its
        way to its name, or from it: each is a folder that would stay for ever.
        """
        with suppress(OSError):
            now = (self.path / _OWNER).stat().st_mtime
            for path in self.path.parent.iterdir():
                with suppress(OSError):
                    self._clear(path, now)

    def _clear(self, path: Path, now: float) -> None:
        if path.name.endswith(_GONE):
            shutil.rmtree(path, ignore_errors=True)
            return
        other = FolderLock(path, path.name, stale_after=self.stale_after)
        owner, _ = other._read()
        latest = max(each.stat().st_mtime for each in (path, *path.iterdir()))
        if _is_dead(owner) or now - latest > _FORGOTTEN:
            if path.name.startswith("."):
                shutil.rmtree(path, ignore_errors=True)
            else:
                other._recover(owner.get("token"))

    def _take(self) -> bool:
        if self.path.exists():
            return False
        mine = self.path.with_name(f".{self.path.name}-{self.token}")
        try:
            mine.mkdir()
            (mine / _BEAT).write_text("0")
            (mine / _OWNER).write_text(json.dumps(_identity() | {"token": self.token}))
            mine.rename(self.path)
        except BaseException as error:
            shutil.rmtree(mine, ignore_errors=True)
            # it may have been released again since the rename found it
            if isinstance(error, OSError) and (error.errno in _NOT_EMPTY or self.path.exists()):
                return False
            raise
        return True

    def _read(self) -> tuple[dict[str, Any], str]:
        """The owner and its count; nothing of a lock that is released at this moment, or damaged."""
        try:
            owner = json.loads((self.path / _OWNER).read_text())
            return (owner if isinstance(owner, dict) else {}), (self.path / _BEAT).read_text()
        except (OSError, ValueError):
            return {}, ""

    def _keep_beating(self) -> None:
        """Count in place: a file that is cut before it is written anew would stay empty on a full disk."""
        count = 0
        while not self._ended.wait(min(5.0, self.stale_after / 6)):
            count += 1
            try:
                if self._read()[0].get("token", self.token) != self.token:
                    raise FileNotFoundError
                with (self.path / _BEAT).open("r+") as file:
                    file.write(str(count))
            except FileNotFoundError:
                log.warning("the lock of %s was taken for abandoned: was this process stopped?", self.what)
                return
            except OSError as error:  # what is refused now may be granted in a while
                log.warning("the lock of %s cannot be kept (%s)", self.what, error)

    def _recover(self, token: str | None) -> None:
        """Rename an abandoned lock away, unless another waiter did and somebody holds it anew.

        The token is None where a machine that lost its power left a lock that says of no owner.
        """
        name = f"{self.path.name}.recovery"
        guard = FolderLock(self.path.with_name(name), self.what, stale_after=self.stale_after)
        with guard:
            there = self.path.is_dir()
            owner, _ = self._read()
            if there and owner.get("token") == token:
                whose = f"process {owner.get('pid')} of {owner.get('host')}, which is gone"
                log.warning("the lock of %s was left by %s", self.what, whose if token else "nobody it names")
                self._remove(self.path)

    def _remove(self, path: Path) -> None:
        gone = path.with_name(f".{path.name}-{uuid.uuid4().hex}{_GONE}")
        try:
            path.rename(gone)
        except OSError:
            return
        shutil.rmtree(gone, ignore_errors=True)


def _identity() -> dict[str, Any]:
    """Who holds a lock, as far as another process of the same host can tell whether it still lives."""
    return {"host": _host(), "pid": os.getpid(), "started": _started(os.getpid())}


def _host() -> str:
    """The name, and which namespace of process numbers: containers may share the one without the other."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{socket.gethostname()}/{space}/{_boot()}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks: numbers of processes are used again. "ended" of one that
    only waits to be collected by its parent."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if told[0] in "ZX" else told[19]


def _is_dead(owner: dict[str, Any]) -> bool:
    pid = owner.get("pid")
    if owner.get("host") != _host() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    started = _started(pid)
    return bool(started and owner.get("started") and started != owner["started"])
