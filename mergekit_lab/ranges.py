"""Ranges of settings: a message names the setting, its value and what it may be.

A class declares what its fields may be in their types: `Literal["mean", "sum"]`, `Share | None`,
`Annotated[float, Ge(0)]`. `check_settings` reads these types, and a run's configuration is checked by the same.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from inspect import get_annotations
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from mergekit_lab.errors import InputError, abbreviate, suggest

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""The largest number of float32, in which most merges are computed."""
FASTEST = 1e30
"""The largest learning rate: Adam's first steps divide it by a tenth and less, which float32 must hold."""
_LONGEST = 2**63
"""Whole numbers from here on are none to torch."""

Count = Annotated[int, Ge(1)]
Share = Annotated[float, Gt(0), Le(1)]
Proportion = Annotated[float, Ge(0), Le(1)]
NotNegative = Annotated[float, Ge(0), Le(FASTEST)]
Rate = Annotated[float, Gt(0), Le(FASTEST)]

_KINDS: dict[Any, tuple[type | UnionType, str]] = {
    float: (int | float, "a number"), int: (int, "a whole number"), bool: (bool, "true or false"),
    NoneType: (NoneType, "null"), Sequence: (Sequence, "a list"), Mapping: (Mapping, "a mapping"),
    list: (Sequence, "a list"), dict: (Mapping, "a mapping"), Literal: (object, ""),
}  # fmt: skip

_BOUNDS = {Ge: (operator.ge, "ge"), Gt: (operator.gt, "gt"), Le: (operator.le, "le"), Lt: (operator.lt, "lt")}


class _Rule(NamedTuple):
    """One member of a field's type: its kind, what a `Literal` lists, and bounds."""

    kind: Any
    choices: tuple[Any, ...]
    bounds: tuple[Any, ...]

    def takes(self, value: object) -> bool:
        if self.kind is Literal:
            return value in self.choices
        if isinstance(value, bool | str):
            return isinstance(value, bool) and self.kind is bool
        return isinstance(value, _KINDS[self.kind][0])

    @property
    def words(self) -> list[str]:
        """What it takes, as messages say it."""
        if self.kind is bool:
            return ["true", "false"]
        within = f" that is {describe_range(self.bounds)}" if self.bounds else ""
        return [str(choice) for choice in self.choices] or [_KINDS[self.kind][1] + within]


def _read_rule(hint: Any) -> _Rule:
    bounds = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    plain = get_args(hint)[0] if bounds else hint
    kind = get_origin(plain) or plain
    return _Rule(kind, get_args(plain) if kind is Literal else (), bounds)


@cache
def _read_rules(taker: Callable[..., Any]) -> Mapping[str, Sequence[tuple[_Rule, ...]]]:
    """What the types of a class and then its parents, or of a function's arguments, say of plain values; others
    are left out.
    """
    known: dict[str, list[tuple[_Rule, ...]]] = {}
    for owner in getattr(taker, "__mro__", (taker,)):
        for name, hint in _read_hints(owner):
            options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            rules = tuple(map(_read_rule, options))
            if all(rule.kind in _KINDS for rule in rules):
                known.setdefault(name, []).append(rules)
    return known


def _read_hints(owner: Any) -> Iterator[tuple[str, Any]]:
    """The types that a class or function declares itself, without those that its module cannot name."""
    for name, hint in get_annotations(owner).items():
        module = sys.modules.get(owner.__module__)
        names = getattr(owner, "__globals__", None) or getattr(module, "__dict__", {})
        with suppress(NameError, TypeError, AttributeError, SyntaxError):  # a user's own
            one = SimpleNamespace(__annotations__={name: hint})
            yield name, get_type_hints(one, {**vars(owner)}, names, include_extras=True)[name]


def check_settings(taker: Callable[..., Any], settings: Mapping[str, object], named: str = "{}") -> None:
    """Raise `InputError` for the first setting that is not of its declared type, or not in its range.

    A class that declares a field again says what it may be; the ranges of its parents hold too.

    Args:
        taker: the class, or the function, whose types count; those of no plain values do not.
        settings: by name.
        named: what messages call one, "training.{}".
    """
    for name, declared in _read_rules(taker).items():
        for rules in declared if name in settings else ():
            if rules is declared[0] or any(rule.takes(settings[name]) for rule in rules):
                _check_setting(named.format(name), settings[name], rules)


def _check_setting(name: str, value: Any, rules: Sequence[_Rule]) -> None:
    taking = [rule for rule in rules if rule.takes(value)]
    words = [word for rule in rules for word in rule.words]
    if any(rule.choices for rule in rules) and not taking:
        require_choice(name, value, words)
    require(bool(taking), name, value, " or ".join(words))
    if isinstance(value, int | float) and not isinstance(value, bool):
        large = isinstance(value, int) and not -_LONGEST <= value < _LONGEST
        wide = any(rule.kind is float for rule in rules)
        advice = "finite in float32; write large ones as 1e30" if wide else "below 2**63 in size"
        require(not large, name, value, f"{_KINDS[taking[0].kind][1]}, {advice}")
        bounds = taking[0].bounds
        null = ", or null" if any(rule.kind is NoneType for rule in rules) else ""
        require(all(_is_within(value, bound) for bound in bounds), name, value, describe_range(bounds) + null)
        require(abs(float(value)) <= FLOAT32_MAX, name, value, "finite in float32")


def _is_within(value: Any, bound: Any) -> bool:
    compare, name = _BOUNDS.get(type(bound), (None, ""))
    return compare is None or bool(compare(value, getattr(bound, name)))


def describe_range(bounds: Iterable[Any]) -> str:
    """Bounds in words, "at least 1"; of a share as an interval, "in (0, 1]"."""
    known = {name: getattr(b, name) for b in bounds if (name := _BOUNDS.get(type(b), (None, ""))[1])}
    least, most = known.get("ge", known.get("gt")), known.get("le", known.get("lt"))
    if least == 0 and most == 1:
        return f"in {'(' if 'gt' in known else '['}0, 1{']' if 'le' in known else ')'}"
    words = []
    if least is not None:
        above = "at least" if "ge" in known else "above"
        words.append("positive" if above == "above" and least == 0 else f"{above} {least}")
    if most is not None:
        words.append(f"{'at most' if 'le' in known else 'below'} {most}")
    return ", ".join(words)


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
    """Raise `InputError` unless the setting is a whole number of at least `least` that torch can hold."""
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value < _LONGEST
    require(fits, name, value, f"a whole number of at least {least}")


def require_number(name: str, value: object) -> None:
    """Raise `InputError` unless the setting is a number that is no larger than a rate may be."""
    require(_is_number(value, -FASTEST), name, value, f"a number from {-FASTEST:g} to {FASTEST:g}")


def require_positive(name: str, value: object) -> None:
    """Raise `InputError` unless the setting is a number above 0, as a learning rate."""
    require(value != 0 and _is_number(value, 0), name, value, f"positive, at most {FASTEST:g}")


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= FASTEST
