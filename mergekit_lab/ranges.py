"""Check settings against the types of the fields or arguments that take them.

A class declares the valid values of a field in its type: `Literal["mean", "sum"]`, `Share | None`,
`Annotated[float, Ge(0)]`. `check_settings` reads these types. A run's configuration is checked in the same way.

pydantic checks types and ranges in its strict JSON mode: a list may stand for a tuple, a string for a path and
`1` for a float, and nothing else is converted. Its errors become messages that name the setting, its value and
the rule.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from inspect import get_annotations
from types import NoneType, SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from mergekit_lab.errors import InputError, abbreviate, suggest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""The largest number of float32, in which most merges are computed."""
FASTEST = 1e30
"""The largest learning rate. Adam's first steps divide it by at most 0.1, and float32 must hold that."""
_LONGEST = 2**63
"""torch takes only whole numbers below this."""

Natural = Annotated[int, Ge(0)]
Count = Annotated[int, Ge(1)]
Share = Annotated[float, Gt(0), Le(1)]
Proportion = Annotated[float, Ge(0), Le(1)]
Magnitude = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0), Le(FASTEST)]
Rate = Annotated[float, Gt(0), Le(FASTEST)]
Number = Annotated[float, Ge(-FASTEST), Le(FASTEST)]

_WORDS = {float: "a number", int: "a whole number", NoneType: "null", Sequence: "a list", Mapping: "a mapping"}
_PLURALS = {float: "numbers", int: "whole numbers", str: "texts", Mapping: "mappings"}
_PLAIN = (*_WORDS, bool, str, list, dict, Union, UnionType)
_BOUNDS = {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt"}
_OUT_OF_RANGE = {"greater_than_equal", "greater_than", "less_than_equal", "less_than"}
"""pydantic's names of errors about the size of a number."""


def check_settings(taker: Callable[..., Any], settings: Mapping[str, object], named: str = "{}") -> None:
    """Raise `InputError` for the first setting that is not of its declared type, or out of its range.

    A subclass may declare a field again, with another type. The ranges of its parents still hold.

    Args:
        taker: the class or function whose declared types are read. Types other than those of plain values
            (numbers, texts, lists, mappings, choices) are skipped.
        settings: by name.
        named: how messages name a setting, such as "training.{}".
    """
    for name, (own, *inherited) in _read_hints(taker).items():
        if name in settings:
            check_value(settings[name], own, named.format(name))
            for hint in inherited if not _has_choices(own) else ():
                check_value(settings[name], hint, named.format(name), of_parent=True)


@cache
def _read_hints(taker: Callable[..., Any]) -> Mapping[str, Sequence[Any]]:
    """By name the plain types that a class and then its parents declare, or those of a function's arguments."""
    known: dict[str, list[Any]] = {}
    for owner in getattr(taker, "__mro__", (taker,)):
        for name, hint in _read_own_hints(owner):
            if _is_plain(hint):
                known.setdefault(name, []).append(hint)
    return known


def _read_own_hints(owner: Any) -> Iterator[tuple[str, Any]]:
    """The types that a class or function declares itself, except those that cannot be resolved."""
    for name, hint in get_annotations(owner).items():
        module = sys.modules.get(owner.__module__)
        names = getattr(owner, "__globals__", None) or getattr(module, "__dict__", {})
        with suppress(NameError, TypeError, AttributeError, SyntaxError):  # of a user's class
            one = SimpleNamespace(__annotations__={name: hint})
            yield name, get_type_hints(one, {**vars(owner)}, names, include_extras=True)[name]


def _is_plain(hint: Any) -> bool:
    hint = strip_annotation(hint)
    origin = get_origin(hint) or hint
    return origin is Literal or (origin in _PLAIN and all(map(_is_plain, get_args(hint))))


def strip_annotation(hint: Any) -> Any:
    """A type without its `Annotated`."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def list_options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    plain = strip_annotation(hint)
    return get_args(plain) if get_origin(plain) in (UnionType, Union) else (hint,)


def check_value(value: Any, hint: Any, name: str, *, of_parent: bool = False) -> Any:
    """Refuse a value that is not of its declared type, or out of its range.

    Args:
        hint: the declared type, with `Annotated`.
        name: for messages.
        of_parent: a subclass declares another type for the field, so only the range counts.

    Returns:
        The value as pydantic reads it.

    Raises:
        InputError: the value does not fit; or one of its numbers is not finite in float32.
    """
    from pydantic import ValidationError

    adapter, where, plain = _make_adapter(hint), f"{name} is {abbreviate(value)}", _to_plain(value)
    if not _is_finite(plain):
        raise InputError(f"{where}; it must be finite in float32")
    if adapter is None:
        return value
    try:
        read = _validate(adapter, plain)
    except ValidationError as error:
        kinds = {each["type"] for each in error.errors(include_url=False, include_input=False)}
        if of_parent and all(kind.endswith("_type") for kind in kinds):
            return value
        raise InputError(f"{where}{_describe_rule(kinds, hint, value)}") from None
    if isinstance(plain, int) and not -_LONGEST <= plain < _LONGEST:
        wide = any(strip_annotation(option) is float for option in list_options(hint))
        rule = "finite in float32; write large ones as 1e30" if wide else "below 2**63 in size"
        raise InputError(f"{where}; it must be a whole number, {rule}")
    return read


def _to_plain(value: Any) -> Any:
    """The value with dicts and lists in place of other mappings and sequences, at any depth."""
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(map(_to_plain, value))
    return value


def _is_finite(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float | int) or abs(value) <= FLOAT32_MAX


def _validate(adapter: TypeAdapter[Any], plain: Any) -> Any:
    try:
        text = json.dumps(plain, default=repr)
    except TypeError:  # JSON has no such keys
        return adapter.validate_python(plain)
    return adapter.validate_json(text)


@cache
def _make_adapter(hint: Any) -> TypeAdapter[Any] | None:
    """pydantic's check of a type; None for a type that pydantic cannot check."""
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    except PydanticUserError:
        return None


def _describe_rule(kinds: set[str], hint: Any, value: Any) -> str:
    """The end of a message: what the value must be."""
    if kinds & {*_OUT_OF_RANGE, "too_short"}:
        rule = describe_range(_list_bounds(hint)) if kinds & _OUT_OF_RANGE else "a list with something in it"
        return f"; it must be {rule}{', or null' if NoneType in list_options(hint) else ''}"
    if _has_choices(hint):
        return suggest(str(value), [word for option in list_options(hint) for word in _list_words(option)])
    return f"; it must be {describe_type(hint)}"


def _has_choices(hint: Any) -> bool:
    return any(get_origin(strip_annotation(option)) is Literal for option in list_options(hint))


def describe_type(hint: Any) -> str:
    """The values that a type takes, for messages."""
    return " or ".join(word for option in list_options(hint) for word in _list_words(option))


def _list_words(option: Any) -> list[str]:
    plain = strip_annotation(option)
    if plain is bool:
        return ["true", "false"]
    if get_origin(plain) is Literal:
        return list(map(str, get_args(plain)))
    if get_origin(plain) is Sequence:
        options = map(strip_annotation, list_options(get_args(plain)[0]))
        return [
            "a list of "
            + " or ".join(_PLURALS.get(get_origin(each) or each) or _name(each) for each in options)
        ]
    bounds = describe_range(_list_bounds(option))
    return [(_WORDS.get(get_origin(plain) or plain) or _name(plain)) + (f" that is {bounds}" if bounds else "")]


def _name(hint: Any) -> str:
    """A type's name without modules, such as `list[str]`."""
    plain = get_type_hints(SimpleNamespace(__annotations__={"it": hint}))["it"]
    return re.sub(r"\w+\.(?=\w)", "", str(plain)) if get_args(plain) else getattr(plain, "__name__", str(plain))


def _list_bounds(hint: Any) -> tuple[Any, ...]:
    """The bounds of the first number in a type that has any."""
    own = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    if describe_range(own):
        return own
    return next((bounds for each in get_args(hint) if (bounds := _list_bounds(each))), ())


def describe_range(bounds: Iterable[Any]) -> str:
    """Bounds in words, such as "at least 1"; bounds 0 and 1 as an interval, such as "in (0, 1]"."""
    known = {name: getattr(b, name) for b in bounds if (name := _BOUNDS.get(type(b)))}
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
    """Raise `InputError` unless `ok`: the setting is `value`, and it must be `rule`."""
    if not ok:
        raise InputError(f"{name} is {abbreviate(value)}; it must be {rule}")


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise `InputError`, with the nearest choice, unless `value` is one of the choices."""
    options = list(choices)
    if value not in options:
        raise InputError(f"{name} is {value!r}{suggest(str(value), options)}")
