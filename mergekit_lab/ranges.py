"""Ranges of settings: a message names the setting, its value and what it may be."""

from collections.abc import Iterable

from mergekit_lab.errors import InputError, abbreviate, suggest

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""The largest number of float32, in which most merges are computed."""
FASTEST = 1e30
"""The largest learning rate: Adam's first steps divide it by a tenth and less, which float32 must hold."""


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise `InputError`: the setting is `value` and must be as `rule` says; unless `ok`."""
    if not ok:
        raise InputError(f"{name} is {abbreviate(value)}; it must be {rule}")


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise `InputError`, with the nearest choice, unless the setting is one of them."""
    options = list(choices)
    if value not in options:
        raise InputError(f"{name} is {value!r}{suggest(str(value), options)}")


def require_whole(name: str, value: object, least: int = -(2**63)) -> None:
    """Raise `InputError` unless the setting is a whole number of at least `least` that torch can hold."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    rule = "a whole number" + (f" of at least {least}" if least > -(2**63) else "")
    require(whole and least <= value < 2**63, name, value, rule)  # type: ignore[operator]


def require_number(name: str, value: object, least: float = -FASTEST, most: float = FASTEST) -> None:
    """Raise `InputError` unless the setting is a number in [`least`, `most`]."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    rule = f"a number from {least:g} to {most:g}"
    require(number and least <= value <= most, name, value, rule)  # type: ignore[operator]


def require_positive(name: str, value: object) -> None:
    """Raise `InputError` unless the setting is a number above 0, as a learning rate."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number and 0 < value <= FASTEST, name, value, f"positive, at most {FASTEST:g}")  # type: ignore[operator]
