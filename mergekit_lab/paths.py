"""Where the package's files and its results are, and two questions to the file system."""

import os
import stat
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def find_conf_dir() -> Path:
    """The Hydra configuration: inside the installed package, or next to it in a source checkout."""
    inside = _PACKAGE / "conf"
    return inside if inside.is_dir() else _PACKAGE.parent / "conf"


def find_default_store() -> Path:
    """`$MERGEKIT_LAB_STORE`, else `$XDG_CACHE_HOME/mergekit_lab`, else `~/.cache/mergekit_lab`."""
    named = os.environ.get("MERGEKIT_LAB_STORE")
    return Path(named) if named else _find_user_cache() / "mergekit_lab"


def find_compiler_cache() -> Path:
    """Compiled kernels, for later runs: `$TORCHINDUCTOR_CACHE_DIR` or among the user's caches."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(named) if named else _find_user_cache() / "mergekit_lab_compiled"


def _find_user_cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache) if cache else Path.home() / ".cache"


def is_stream(path: Path) -> bool:
    """Whether this is a pipe, a socket or a device: opening one may block forever."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def sync_to_disk(path: Path) -> None:
    """Flush a file's bytes, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
