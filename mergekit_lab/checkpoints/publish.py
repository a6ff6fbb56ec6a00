"""Publish a model's folder in one step.

All files are written into a hidden folder beside `out`, flushed, and renamed. So a reader of `out` sees either
the old folder or the whole new one. A process that is killed leaves its hidden folder behind, and the next
merge into `out` removes it. Linux can exchange two folders in one step on most filesystems. Where that fails,
two renames do it. A process killed between them leaves no `out`, and the next merge first puts the old one
back.

The process that fills a hidden folder holds a lock on it, which the kernel releases when the process ends. A
lock says nothing about another machine's processes, so the folder's name contains an id of the kernel's boot.
Process numbers and host names do not decide anything, because containers share them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mergekit_lab.errors import InputError, join_names
from mergekit_lab.paths import sync_to_disk

log = logging.getLogger(__name__)

RECORD = "mergekit_lab.json"
"""What made the folder; its presence marks a folder that a merge may overwrite."""


def check_out(out: Path, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse an `out` that a merge must not write.

    Raises:
        InputError: a file, a folder with something in it (with `overwrite`: that no merge wrote), one that
            holds an input, or one that cannot be made.
    """
    where = _resolve(out)
    if out.suffix in {".safetensors", ".bin", ".pt"} or (out.exists() and not out.is_dir()):
        raise InputError(f"out={out} is a file; give a folder")
    if where in {Path(where.anchor), Path(os.path.expanduser("~"))}:
        raise InputError(f"out={out} cannot hold a model")
    for path in inputs:
        if path.resolve().is_relative_to(where) or path.absolute().is_relative_to(out.absolute()):
            raise InputError(
                f"out={out} holds {path.name}, which is an input of this merge: give another folder"
            )
    above = next(parent for parent in where.parents if os.path.exists(parent))
    if not above.is_dir():
        raise InputError(f"out={out} cannot be made: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"out={out} cannot be made: {above} is not writable")
    if not out.is_dir():
        return
    if not os.access(out, os.R_OK | os.X_OK):
        raise InputError(f"out={out} cannot be read: make its content readable, or give another folder")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise InputError(f"out={out} exists and is not empty: give another folder, or set overwrite=true")
    if not (out / RECORD).is_file():
        raise InputError(f"out={out} was not written by a merge (it has no {RECORD}): remove it yourself")


def _resolve(out: Path) -> Path:
    try:
        out.exists()
        return out.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, a loop, no working folder
        raise InputError(f"out={str(out)[:200]} cannot be a folder ({error})") from None


@contextmanager
def make_folder(out: Path, overwrite: bool = False, planned: Mapping[str, int] | None = None) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the context is left without an error.

    Where `out` is a link, the folder that it leads to is made or replaced, and the link stays.

    Args:
        planned: the files that must be there in the end, each with its bytes; more may be added meanwhile.

    Raises:
        InputError: see `check_out`; the disk is full; somebody removed the folder, or files of it, meanwhile.
    """
    planned = {} if planned is None else planned
    out = _resolve(out)
    _clear_leftovers(out)
    check_out(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, lock = _make_partial(out)
    try:
        try:
            yield partial
            sync_tree(partial)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise InputError(f"the disk of {out} is full") from error
            _check_whole(out, partial, lock, {})
            raise
        _check_whole(out, partial, lock, planned)
        _swap(partial, out, overwrite)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _check_whole(out: Path, partial: Path, lock: int, planned: Mapping[str, int]) -> None:
    """Refuse to publish less than was written."""
    problem = None
    if not os.path.isdir(partial) or not os.path.samestat(os.stat(partial), os.fstat(lock)):
        problem = "was removed"
    else:
        sizes = {name: os.stat(partial / name).st_size for name in planned if (partial / name).is_file()}
        cut = [name for name, size in planned.items() if sizes.get(name) != size]
        if cut:
            problem = f"lost files or parts of them ({join_names(cut)})"
    if problem:
        raise InputError(
            f"out={out} was not written, and its old content is untouched: the temporary folder {partial} "
            f"{problem} before it was complete. Does another program clear hidden folders there?"
        )


def _make_partial(out: Path) -> tuple[Path, int]:
    """Make a hidden folder with a unique name, and its lock, held before anybody can take it for abandoned."""
    token = uuid.uuid4().hex[:12]
    making = out.with_name(f".{token}.making")
    making.mkdir()
    lock = os.open(making, os.O_RDONLY | os.O_DIRECTORY)
    _take_lock(lock)
    partial = out.with_name(f"{_make_prefix(out)}{_read_boot()}.{token}.partial")
    making.rename(partial)
    return partial, lock


def _take_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has it, or the filesystem knows no locks
        return False
    return True


_MAKING = re.compile(r"\.[0-9a-f]{12}\.making")
_FORGOTTEN = 3600.0
"""Seconds after which an empty folder that was not renamed counts as abandoned."""
_LONGEST = 150
"""Bytes of `out`'s name that hidden folders repeat. Longer names are cut and get a hash."""


def _make_prefix(out: Path) -> str:
    name = os.fsencode(out.name)
    if len(name) <= _LONGEST:
        return f".{out.name}."
    return f".{name[:_LONGEST].decode(errors='ignore')}-{hashlib.sha256(name).hexdigest()[:12]}."


def _read_boot() -> str:
    """An id of this boot of the kernel, within which locks can be trusted; the host's name without one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = socket.gethostname()
    return hashlib.sha256(boot.encode()).hexdigest()[:12]


def _clear_leftovers(out: Path) -> None:
    """Delete what killed merges left beside `out`, if they were surely killed. An old `out` that one had moved
    away between two renames is put back.
    """
    for making in out.parent.glob(".*.making"):  # as it is for a moment, and empty
        with suppress(OSError):
            if _MAKING.fullmatch(making.name) and time.time() - making.stat().st_mtime > _FORGOTTEN:
                making.rmdir()
    for path in [*_find_siblings(out, ".old"), *_find_siblings(out, ".partial")]:
        partial = path.with_suffix(".partial")
        if path.exists() and (not partial.exists() or _is_abandoned(partial)):
            if path.suffix == ".old" and not out.exists():
                path.rename(out)
            else:
                shutil.rmtree(path, ignore_errors=True)
        elif path.exists() and f".{_read_boot()}." not in path.name:
            log.warning(
                "%s was left by another machine, or before this one rebooted: remove it, unless a "
                "merge into %s is under way there",
                *(path, out),
            )


def _find_siblings(out: Path, suffix: str) -> list[Path]:
    names = os.listdir(out.parent) if out.parent.is_dir() else []
    return [out.with_name(n) for n in sorted(names) if n.startswith(_make_prefix(out)) and n.endswith(suffix)]


def _is_abandoned(partial: Path) -> bool:
    """Whether a process of this boot made the folder, and has ended."""
    if f".{_read_boot()}." not in partial.name:
        return False
    try:
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        return _take_lock(lock)
    finally:
        os.close(lock)


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync_to_disk(path)


def _swap(partial: Path, out: Path, overwrite: bool) -> None:
    check_out(out, overwrite)
    if not out.is_dir() or not any(out.iterdir()):
        partial.rename(out)
    elif not exchange(partial, out):
        old = partial.with_suffix(".old")
        out.rename(old)
        partial.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    sync_to_disk(out.parent)


_HERE = -100  # AT_FDCWD: paths are from the working folder
_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step by Linux's `renameat2`. Returns False if the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE) == 0)
