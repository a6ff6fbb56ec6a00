"""SHA-256 of files, which are read again only where they may have changed."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from pathlib import Path

Version = tuple[int, ...]
"""A file's device, inode, size and times of change. Writing or replacing a file changes it; renaming its folder
does not."""
TICK = 20_000_000
"""Nanoseconds within which a file system may give two changes the same time."""
_known: dict[Version, str] = {}
"""Digests of the files that this process has read."""


def read_version(path: Path) -> Version | None:
    """A file's version; None if there is no such file, or if it changed within the last `TICK`."""
    try:
        status = path.stat()
    except OSError:
        return None
    times = status.st_mtime_ns, status.st_ctime_ns
    if time.time_ns() - max(times) < TICK:
        return None
    return (status.st_dev, status.st_ino, status.st_size, *times)


def hash_bytes(path: Path) -> str:
    """The hexadecimal SHA-256 of a file's bytes, read once in a process unless they may have changed."""
    version = read_version(path)
    if version is None or version not in _known:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if version is None:
            return digest
        _known[version] = digest
    return _known[version]


def hash_file(path: Path) -> str:
    """The hexadecimal SHA-256 of a file's bytes. Files in the hub's cache are named by it, and are not read."""
    return path.resolve().name if is_blob(path) else hash_bytes(path)


def is_blob(path: Path) -> bool:
    """Whether a file is, or links to, a file of the hub's cache: `blobs/SHA256`."""
    folder, name = path.resolve().parts[-2:]
    return folder == "blobs" and re.fullmatch(r"[0-9a-f]{64}", name) is not None


def hash_folder(root: Path, files: Iterable[Path]) -> str:
    """The SHA-256 of files below a folder, by their names there and their bytes, in this order."""
    lines = [f"{file.relative_to(root)} {hash_file(file)}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
