"""Read the inputs that a user names: a list, a mapping, or the lines of a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergekit_lab.checkpoints import parse_hub_id
from mergekit_lab.checkpoints.libraries import LIBRARIES
from mergekit_lab.checkpoints.reader import find_source
from mergekit_lab.errors import InputError, abbreviate, join_names
from mergekit_lab.merging import inputs
from mergekit_lab.ranges import require


def read_sources(value: Any, what: str) -> list[str] | dict[str, str]:
    """A list, a mapping, or the lines of the file that `@path` names.

    Raises:
        InputError: none of these, or an empty one.
    """
    if isinstance(value, str):
        if not value.startswith("@"):
            raise InputError(f"{what}={value} is one path: give a list, {what}=[{value}], or {what}=@list.txt")
        file = Path(value[1:]).expanduser()
        if not file.is_file():
            raise InputError(f"{what}={value}: there is no file {file}")
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{what}={value}: {file} cannot be read ({error})") from None
        value = [line for line in lines if line and not line.startswith("#")]
        pairs = [line.split("=", 1) for line in value]
        if pairs and all(len(pair) == 2 and "/" not in pair[0] for pair in pairs):
            names = [name.strip() for name, _ in pairs]
            if len(set(names)) < len(names):
                raise InputError(f"{what}={value}: {file} gives a name twice ({join_names(names)})")
            return {name.strip(): path.strip() for name, path in pairs}
    require(
        isinstance(value, list | Mapping) and bool(value), what, value, "a list or a mapping of checkpoints"
    )
    paths = list(value.values()) if isinstance(value, Mapping) else value
    odd = [path for path in paths if isinstance(path, bool) or not isinstance(path, str | int | float)]
    if odd:
        raise InputError(f"{what} holds {abbreviate(odd[0])}, which is not a path")
    if isinstance(value, Mapping):
        return {str(name): str(path) for name, path in value.items()}
    return [str(path) for path in paths]


def name_by_folder(sources: Any, what: str) -> dict[str, Any]:
    """Inputs by name: a mapping's own names, or those of the folders, if they differ."""
    called = None
    if not isinstance(sources, str | Path | Mapping):
        sources = list(sources)
        called = [shorten_path(source) if isinstance(source, str | Path) else "" for source in sources]
    unique = called is not None and len(set(called)) == len(called) and all(called)
    return inputs.name_sources(sources, what, called if unique else None)


def shorten_path(source: str | Path) -> str:
    """A path's last part, or the folder's if the file has a name that all models use."""
    path = Path(source)
    known = any(path.name in library.weights for library in LIBRARIES)
    return path.absolute().parent.name if known else path.name


def refuse_absent(sources: Mapping[str, Any]) -> None:
    """Refuse local inputs that do not exist. Messages call them by these names.

    Raises:
        InputError: a path that does not exist and is no hub id.
    """
    for name, source in sources.items():
        if isinstance(source, Path) or (isinstance(source, str) and not parse_hub_id(source)):
            find_source(source)
            if not Path(source).expanduser().exists():
                raise InputError(f"{name}: {source} does not exist")


def list_local_paths(base: Any, experts: Any) -> list[Path]:
    """The inputs of a merge that are existing paths."""
    sources = [base, *(experts.values() if isinstance(experts, Mapping) else experts)]
    paths = [Path(source).expanduser() for source in sources if isinstance(source, str | Path)]
    return [path for path in paths if os.path.exists(path)]
