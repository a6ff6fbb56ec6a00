"""Keep the results of a long loop in a file, so that an interrupted process continues where it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Cell = TypeVar("Cell")


def keep_results(compute: Callable[[Cell], Any], file: Path) -> Callable[[Cell], Any]:
    """`compute`, called once for each cell: results of an earlier try are read from the file.

    Args:
        compute: returns what JSON can hold. NaN and infinities are read back as NaN.
        file: JSON lines. A line that was cut short is skipped.
    """
    done = {}
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        try:
            cell, result = json.loads(line)
            done[_as_cell(cell)] = with_nan(result)
        except (ValueError, TypeError):
            continue

    def recall(cell: Cell) -> Any:
        if cell not in done:
            done[cell] = compute(cell)
            with file.open("a") as stream:
                # the newline comes first: it also ends a line that was cut short
                stream.write("\n" + json.dumps([cell, without_nan(done[cell])], allow_nan=False))
        return done[cell]

    return recall


def _as_cell(value: Any) -> Any:
    return tuple(map(_as_cell, value)) if isinstance(value, list) else value


def without_nan(data: Any) -> Any:
    """The data with None in place of every NaN and infinity, as JSON needs it."""
    return _replace(
        data, lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    )


def with_nan(data: Any) -> Any:
    """The data with NaN in place of every None, as figures need it."""
    return _replace(data, lambda value: math.nan if value is None else value)


def _replace(data: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(data, Mapping):
        return {name: _replace(value, change) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_replace(value, change) for value in data]
    return change(data)
