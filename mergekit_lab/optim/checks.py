"""Hyper-parameter checks whose messages name the parameter, its value and its range."""

import math
from collections.abc import Iterable
from typing import Any

from mergekit_lab.errors import InputError, suggestion


def require_number(name: str, value: Any, minimum: float = -math.inf) -> None:
    """Raise `InputError` unless `value` is a finite number, at least `minimum`."""
    bound = "" if minimum == -math.inf else f" of at least {minimum:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name}={value!r} is a {type(value).__name__}; it must be a finite number{bound}")
    if not math.isfinite(value) or value < minimum:
        raise InputError(f"{name}={value!r} is out of range; it must be a finite number{bound}")


def require_integer(name: str, value: Any, minimum: float = -math.inf) -> None:
    """Raise `InputError` unless `value` is an integer, at least `minimum`."""
    require_number(name, value, minimum)
    if not isinstance(value, int):
        raise InputError(f"{name}={value!r} must be a whole number")


def require_known(name: str, value: str, known: Iterable[str]) -> None:
    """Raise `InputError`, with the nearest valid name, unless `value` is one of `known`."""
    options = tuple(known)
    if value not in options:
        way_out = suggestion(str(value), options)
        raise InputError(f"{name}={value!r} is not one of {', '.join(options)}{way_out}")
