"""Read YAML that others wrote. Its size is checked first: a few lines of aliases can fill the memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from mergekit_lab.errors import InputError, say_error

_LARGEST = 1 << 20
"""Bytes of a file at most. Our own have a few thousand, and parsing a megabyte takes seconds."""
_MOST_NODES = 20_000
"""Values of a file at most, with aliases expanded. Our largest configuration has some hundred, and OmegaConf
takes seconds for this many."""
_DEEPEST = 64
"""Levels of nesting at most. Our configurations have fewer than ten."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Measures files. libyaml's takes a tenth of the time, where it is installed."""
UNMADE = (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What PyYAML raises for text without values. For `2001-13-45` and `!!bool 7` that is no error of its own."""


def read_yaml_text(file: Path) -> str:
    """The text of a YAML file that is small enough to be parsed. Its syntax is not checked.

    Raises:
        InputError: it is no file or not UTF-8, is larger than a megabyte or nested deeper than any
            configuration, contains itself, or has more than 20,000 values with its aliases expanded.
        OSError: it cannot be read.
    """
    if file.exists() and not file.is_file():  # reading a pipe may block forever
        raise InputError(f"{file} is a folder, a pipe or a device, not a file")
    if file.stat().st_size > _LARGEST:
        raise InputError(f"{file} has more than a megabyte, too much for a configuration")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 ({error})") from None
    _check_size(text, str(file))
    return text


def make_values(text: str, who: str) -> list[Any]:
    """The values of a YAML text's documents, without empty documents.

    Args:
        who: what messages call the text.

    Raises:
        InputError: it is no YAML, or as `read_yaml_text`.
    """
    if len(text) > _LARGEST:
        raise InputError(f"{who} has more than a megabyte, too much for a configuration")
    _check_size(text, who)
    try:
        return [each for each in yaml.safe_load_all(text) if each is not None]
    except UNMADE as error:
        raise InputError(f"{who} cannot be read as YAML ({explain_yaml(error)})") from None


def explain_yaml(error: Exception) -> str:
    """Explain a YAML text's error and its place in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        where = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        return f"{error.problem[:200]}{where}"
    return say_error(error)[:200]


def _check_size(text: str, who: str) -> None:
    depth, nodes = _measure(text)
    if depth > _DEEPEST:
        raise InputError(f"{who} is nested too deep to be read")
    if nodes > _MOST_NODES:
        raise InputError(
            f"{who} has more than {_MOST_NODES} values once its aliases (*name) are written out: write fewer"
        )


def _measure(text: str, loader: Any = _LOADER) -> tuple[int, float]:
    """The depth of nesting of a YAML text, and its number of values with aliases expanded.

    Counting stops at a syntax error, or beyond the limits.
    """
    deepest, nodes = 0, 0.0
    sizes: dict[str | None, float] = {}
    around: list[tuple[str | None, float]] = []
    """The lists and mappings that are open: the anchor of each, and the number of values before it."""
    try:
        for event in yaml.parse(text, loader):
            if isinstance(event, yaml.AliasEvent):
                nodes += sizes.get(event.anchor, 1)
            elif isinstance(event, yaml.CollectionStartEvent):
                around.append((event.anchor, nodes))
                sizes[event.anchor] = math.inf  # for an alias within itself
                nodes += 1
            elif isinstance(event, yaml.ScalarEvent):
                sizes[event.anchor] = 1
                nodes += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = around.pop()
                sizes[anchor] = nodes - before
            deepest = max(deepest, len(around))
            if deepest > _DEEPEST or nodes > _MOST_NODES:
                break
    except yaml.YAMLError:
        if loader is not yaml.SafeLoader:  # libyaml gives up before it says how deep a text is nested
            return _measure(text, yaml.SafeLoader)
    return deepest, nodes
