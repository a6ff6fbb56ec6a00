"""A model's folder, published at once.

Everything is written into a hidden sibling, flushed, and renamed: whoever looks at `out` sees the folder that
was there before, or the whole new one. A process that is killed leaves the hidden sibling, which the next merge
into the same place removes. Where the system cannot exchange two folders at once (it can on Linux, on most
filesystems), a process killed between two renames leaves no `out`; the next merge puts the old one back first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mergekit_lab.errors import InputError

RECORD = "mergekit_lab.json"
"""What made the folder; its presence marks a folder that a merge may overwrite."""


def check_out(out: Path, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse a place where a merge must not write.

    Raises:
        InputError: a file, a folder with something in it (with `overwrite`: that no merge wrote), one that
            holds an input, or one in a place where none can be made.
    """
    try:
        where = out.resolve()
        out.exists()
    except (OSError, ValueError) as error:
        raise InputError(f"out={str(out)[:200]} is no place for a folder ({error})") from None
    if out.suffix in {".safetensors", ".bin", ".pt"} or out.is_file():
        raise InputError(f"out={out} is a file; give a folder")
    if where == Path(where.anchor) or where == Path.home():
        raise InputError(f"out={out} is no place for a model")
    for path in inputs:
        if path.resolve().is_relative_to(where) or path.absolute().is_relative_to(out.absolute()):
            raise InputError(
                f"out={out} holds {path.name}, which is an input of this merge: give another folder"
            )
    above = next(parent for parent in where.parents if parent.exists())
    if not above.is_dir():
        raise InputError(f"out={out} cannot be made: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"out={out} cannot be made: {above} may not be written into")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise InputError(f"out={out} exists and is not empty: give another folder, or set overwrite=true")
    if not (out / RECORD).is_file():
        raise InputError(f"out={out} was not written by a merge (it has no {RECORD}): remove it yourself")


@contextmanager
def new_folder(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the context is left without an error.

    Where `out` is a link, the folder that it leads to is made or replaced, and the link stays.

    Raises:
        InputError: see `check_out`; the disk is full.
    """
    out = out.resolve()
    _clear_leftovers(out)
    check_out(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{socket.gethostname()}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        yield partial
        _sync_tree(partial)
        _swap(partial, out, overwrite)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise InputError(f"the disk of {out} is full") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clear_leftovers(out: Path) -> None:
    """Delete what killed merges of this machine left beside `out`, but put back what one had moved away."""
    head = f".{out.name}.{socket.gethostname()}."
    for path in list(out.parent.iterdir()) if out.parent.is_dir() else ():
        if path.name.startswith(head) and path.name.endswith((".partial", ".old")):
            owner = path.name.removeprefix(head).split(".")[0]
            if not owner.isdigit() or _alive(int(owner)):
                continue
            if path.suffix == ".old" and not out.exists():
                path.rename(out)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _swap(partial: Path, out: Path, overwrite: bool) -> None:
    check_out(out, overwrite)
    if not out.is_dir() or not any(out.iterdir()):
        partial.rename(out)
    elif not _exchange(partial, out):
        old = partial.with_suffix(".old")
        out.rename(old)
        partial.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    handle = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_HERE = -100  # AT_FDCWD: paths are from the working folder
_RENAME_EXCHANGE = 2


def _exchange(one: Path, other: Path) -> bool:
    """Give two paths each other's content at once, by Linux's `renameat2`; False where that cannot be done."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE) == 0)
