"""Reading and deleting what may be anything: a store is a folder that others write to, too."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path


def read_file(path: Path, limit: int) -> bytes:
    """The bytes of a file that is one, and not too large.

    Raises:
        OSError: it cannot be read, is a pipe, a device or a folder (nothing is waited for), or has more bytes.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return data


def discard(path: Path) -> None:
    """Delete a file or a folder, as far as that can be done; of a link, the link."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
