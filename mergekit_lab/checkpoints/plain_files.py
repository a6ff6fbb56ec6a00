"""Files from elsewhere, checked before they are opened: a pipe is never waited for, a pointer never parsed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergekit_lab.errors import InputError

_POINTERS = {
    b"version https://git-lfs.github.com/spec/": "a Git LFS pointer, not the file: run `git lfs pull` there",
    b"/annex/objects/": "a git-annex pointer, not the file: run `git annex get` there",
}
_DEEPEST = 64
"""Levels of a JSON file; configurations have fewer than ten."""


def check_file(file: Path) -> None:
    """Refuse what cannot be read as a file.

    Raises:
        InputError: nothing there, a folder, a dead link, a pipe or a device (reading one may never end), a
            pointer that version control left in the file's stead, or no permission.
    """
    try:
        mode = file.stat().st_mode
        if stat.S_ISREG(mode):
            with file.open("rb") as opened:
                head = opened.read(64)
    except (FileNotFoundError, NotADirectoryError):
        if file.is_symlink():
            raise InputError(f"{file} is a link that leads nowhere ({os.readlink(file)})") from None
        raise InputError(f"the file {file} does not exist") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(file)[:1000]} cannot be read ({reason})") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise InputError(f"{file} is {kind}, not a file")
    for start, what in _POINTERS.items():
        if head.startswith(start):
            raise InputError(f"{file} is {what}")


def read_json(file: Path) -> Any:
    """The content of a small JSON file.

    Raises:
        InputError: see `check_file`; it is not JSON, or it is nested deeper than any configuration.
    """
    check_file(file)
    try:
        content = json.loads(file.read_bytes())
    except RecursionError:
        raise InputError(f"{file} is nested too deep to be read") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} is not JSON ({str(error)[:200]})") from None
    level = [content]
    for _ in range(_DEEPEST):
        level = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [child for item in level if isinstance(item, list) for child in item]
    if level:
        raise InputError(f"{file} is nested too deep to be read")
    return content


def read_object(file: Path) -> dict[str, Any]:
    """The content of a small JSON file that holds an object; empty if there is none.

    Raises:
        InputError: it is not a JSON object, or no file that can be read.
    """
    content = read_json(file) if os.path.lexists(file) else {}
    if not isinstance(content, dict):
        raise InputError(f"{file} holds a {type(content).__name__}, not an object")
    return content


def flatten(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """What nested mappings hold, by the keys that lead there, joined by dots; an empty mapping stays one."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{before}{key}.") if nested else {f"{before}{key}": value}
    return flat
