"""Plain values of a configuration against the types that are declared for them.

Types and ranges are pydantic's to check, in its strict JSON mode: a list is a tuple where one is declared, a
string a path, `1` a float, and nothing else is converted. One table turns its errors into our words.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from mergekit_lab.errors import InputError, abbreviate, suggest
from mergekit_lab.ranges import FLOAT32_MAX, describe_range
from mergekit_lab.schema.target import Target

_MAPPINGS = (dict, Mapping)
_SEQUENCES = (list, tuple, set, Sequence, Iterable)
_OUT_OF_RANGE = {"greater_than_equal", "greater_than", "less_than_equal", "less_than"}
"""pydantic's errors of numbers."""


def list_options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    if get_origin(hint) is Annotated:
        return list_options(get_args(hint)[0])
    return get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)


def find_inner_type(hint: Any, value: object) -> Any:
    """What a type declares for the items of a list or mapping; `Any` if it is not declared."""
    wanted = _MAPPINGS if isinstance(value, Mapping) else _SEQUENCES
    for option in list_options(hint):
        if get_origin(option) in wanted:
            return next((each for each in reversed(get_args(option)) if each is not Ellipsis), Any)
    return Any


def takes_mapping(hint: Any) -> bool:
    """Whether a value of this type may be a group of keys."""
    return any(
        option is Any or option in _MAPPINGS or get_origin(option) in _MAPPINGS for option in list_options(hint)
    )


def check_value(value: Any, hint: Any, name: str) -> None:
    """Refuse a value that is not of the type, or out of the range, that is declared for it.

    Args:
        value: without any `_target_` in it.
        hint: as it is declared, with `Annotated`.
        name: of the key, for messages.

    Raises:
        InputError: the value does not fit; or one of its numbers is not finite in float32.
    """
    where = f"{name} is {abbreviate(value)}"
    if not _is_finite(value):
        raise InputError(f"{where}; it must be finite, in float32 too")
    if any(get_origin(option) is Target for option in list_options(hint)):
        if value is not None or NoneType not in list_options(hint):
            raise InputError(f"{where}; it must be a group with a _target_")
    elif isinstance(value, Mapping) and not takes_mapping(hint):
        raise InputError(f"{where}; it must be {_describe(hint)}")
    elif (adapter := _make_adapter(hint)) is not None:
        try:
            adapter.validate_json(json.dumps(value, default=repr))
        except ValidationError as error:
            raise InputError(f"{where}{_describe_rule(error, hint, value)}") from None


def _is_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float | int) or abs(value) <= FLOAT32_MAX


@cache
def _make_adapter(hint: Any) -> TypeAdapter[Any] | None:
    """None for a type that says nothing of plain values."""
    try:
        return TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    except PydanticUserError:
        return None


def _describe_rule(error: ValidationError, hint: Any, value: Any) -> str:
    """What the value must be, in our words."""
    kinds = {each["type"] for each in error.errors(include_url=False, include_input=False)}
    if kinds & {*_OUT_OF_RANGE, "too_short"}:
        rule = describe_range(_list_bounds(hint)) if kinds & _OUT_OF_RANGE else "a list with something in it"
        return f"; it must be {rule}{', or null' if NoneType in list_options(hint) else ''}"
    choices = [c for option in list_options(hint) if get_origin(option) is Literal for c in get_args(option)]
    if choices and isinstance(value, str):
        flags = ("true", "false") if bool in list_options(hint) else ()
        return suggest(value, [*map(str, choices), *flags])
    return f"; it must be {_describe(hint)}"


def _list_bounds(hint: Any) -> tuple[Any, ...]:
    """Of the first number with any in a type."""
    own = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    if describe_range(own):
        return own
    return next((bounds for each in get_args(hint) if (bounds := _list_bounds(each))), ())


def _describe(hint: Any) -> str:
    """A type as a user reads it."""
    return "of type " + " | ".join(map(_name, list_options(hint)))


def _name(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _name(arguments[0])
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if hint in (None, NoneType):
        return "null"
    if origin is None:
        return str(getattr(hint, "__name__", hint)).replace("dict", "group")
    inner = ", ".join(
        "…" if each is Ellipsis else _describe(each).removeprefix("of type ") for each in arguments
    )
    return f"{_name(origin)}[{inner}]"
