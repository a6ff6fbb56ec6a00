"""Ranges of settings: a message names the setting, its value and what it may be."""

import math
from collections.abc import Iterable

from mergekit_lab.errors import InputError, abbreviate, suggest


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise `InputError`: the setting is `value` and must be as `rule` says; unless `ok`."""
    if not ok:
        raise InputError(f"{name} is {abbreviate(value)}; it must be {rule}")


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise `InputError`, with the nearest choice, unless the setting is one of them."""
    options = list(choices)
    if value not in options:
        raise InputError(f"{name} is {value!r}{suggest(str(value), options)}")


def require_whole(name: str, value: object, least: int) -> None:
    """Raise `InputError` unless the setting is a whole number of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= least, name, value, f"a whole number of at least {least}")  # type: ignore[operator]


def require_positive(name: str, value: float) -> None:
    """Raise `InputError` unless the setting is a finite number above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number and math.isfinite(value) and value > 0, name, value, "positive and finite")


FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""The largest number of float32, in which most merges are computed."""
FASTEST = 1e30
"""The largest learning rate: Adam's first steps divide it by a tenth and less, which float32 must hold."""


def require_rate(name: str, value: float) -> None:
    """Raise `InputError` unless the setting is a learning rate: positive, and far enough from float32's end."""
    require(0 < value <= FASTEST, name, value, f"positive, at most {FASTEST:g}")
