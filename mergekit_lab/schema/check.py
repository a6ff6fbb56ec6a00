"""Compare a composed configuration with the code that reads it, before any work.

Hydra refuses a misspelled key only on the command line. Keys from a file or with `+key=` would be ignored or
fail late. So every key is compared with what takes it: the fields of a schema's dataclasses, or the signature
of a `_target_`. A target is called only if a schema or signature says which class it must make, and it makes
that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import get_class, get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mergekit_lab.errors import InputError, abbreviate, say_error, suggest
from mergekit_lab.ranges import check_value, describe_type, list_options, require, strip_annotation
from mergekit_lab.schema.target import Target

T = TypeVar("T")
_MAPPINGS = (dict, Mapping)
_SEQUENCES = (list, tuple, set, Sequence, Iterable)
_HYDRA_KEYS = {"_target_", "_partial_", "_recursive_", "_convert_"}


def build(node: Any, kind: Callable[..., T]) -> T:
    """Make the object of a node's `_target_`. Its own errors are passed on unchanged.

    Args:
        node: a group with a `_target_`.
        kind: the class that it must make, or a subclass of it.

    Raises:
        InputError: the target is no such class, or refuses its arguments.
    """
    built: T = _instantiate(node, kind, False)
    return built


def build_partial(node: Any, kind: Callable[..., T]) -> partial[T]:
    """The same for a node that says `_partial_: true`: a call of the result makes a `kind`."""
    built: partial[T] = _instantiate(node, kind, True)
    return built


def _instantiate(node: Any, kind: Callable[..., Any], partially: bool) -> Any:
    plain: Any = OmegaConf.to_container(
        node if OmegaConf.is_config(node) else OmegaConf.create(node), resolve=True
    )
    _check(plain, Target[kind], ())  # type: ignore[valid-type]
    if bool(plain.get("_partial_")) != partially:
        how = "needs `_partial_: true`" if partially else "may have no `_partial_`"
        raise InputError(f"the configuration of {plain['_target_']} {how}")
    try:
        return instantiate(node, _convert_="all")
    except HydraException as error:
        cause = error.__cause__
        if isinstance(cause, InputError):
            raise cause from None
        raise InputError(f"{plain['_target_']} cannot be built: {cause or error}") from None


def _read_hints(target: Any) -> Mapping[str, Any]:
    """The types of the arguments of a class or a function, as far as they can be resolved."""
    taker = target.__init__ if inspect.isclass(target) and not is_dataclass(target) else target
    with suppress(NameError, TypeError, AttributeError):
        return get_type_hints(taker, include_extras=True)
    return {}


def check_against(cfg: DictConfig, schema: type) -> DictConfig:
    """Refuse every key that the schema does not have, and every value that does not fit.

    Returns:
        The configuration with `1.0` for every `1` that is read as a float: keys tell them apart.

    Raises:
        InputError: an unknown key (with its file and the nearest known one), an interpolation that does not
            resolve, a value of the wrong type or range, or a `_target_` that makes something else.
    """
    try:
        plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise InputError(f"the configuration does not resolve: {say_error(error)}") from None
    read = _check_keys(plain, schema, ())
    converted: DictConfig = OmegaConf.create(_with_floats(OmegaConf.to_container(cfg, resolve=False), read))
    OmegaConf.set_struct(converted, OmegaConf.is_struct(cfg))
    return converted


def _with_floats(value: Any, read: Any) -> Any:
    """A plain value, in which integers that were read as floats are floats."""
    if isinstance(value, Mapping) and isinstance(read, Mapping):
        return {name: _with_floats(item, read.get(name, item)) for name, item in value.items()}
    if isinstance(value, list) and isinstance(read, list | tuple) and len(value) == len(read):
        return [_with_floats(*pair) for pair in zip(value, read, strict=True)]
    return read if type(value) is int and type(read) is float else value


def check_group(node: Any, kind: type, path: tuple[str, ...]) -> Mapping[str, Any]:
    """Check a group of keys against a dataclass of the schema, which checks what depends on several fields.

    Args:
        node: plain.
        path: of the group, for messages.
    """
    where = ".".join(path)
    require(isinstance(node, Mapping), where, node, "a group of keys")
    read = _check_keys(node, kind, path)
    try:
        kind(**node)
    except TypeError as error:
        raise InputError(f"{where}: {error}") from None
    return read


def _check_keys(node: Mapping[str, Any], taker: Any, path: tuple[str, ...]) -> Mapping[str, Any]:
    """The keys of a group against the fields of a schema's dataclass, or what a target takes."""
    is_target = "_target_" in node
    parameters = inspect.signature(taker).parameters
    hints = _read_hints(taker) if is_target else get_type_hints(taker, include_extras=True)
    keys = {name: value for name, value in node.items() if not (is_target and name in _HYDRA_KEYS)}
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        _refuse_unknown(keys, parameters, path)
    lacking = [name for name, each in parameters.items() if name not in keys and each.default is each.empty]
    if lacking and not is_target:
        raise InputError(f"the configuration lacks {'.'.join((*path, lacking[0]))}")
    read = dict(node)
    # groups first: optimizers interpolate training's values, which are told of by their own name
    for name in keys if is_target else sorted(keys, key=lambda name: not is_dataclass(hints[name])):
        if is_target and name == "coefficient" and keys[name] is None:
            continue  # validation chooses it
        check = check_group if not is_target and is_dataclass(hints[name]) else _check
        read[name] = check(keys[name], hints.get(name, Any), (*path, name))
    return read


def _check(value: Any, hint: Any, path: tuple[str, ...]) -> Any:
    """Check a value and every target in it against the value's type. Returns the value as it is read."""
    inner, options = _find_inner_type(hint, value), list(map(strip_annotation, list_options(hint)))
    name = ".".join(path)
    if isinstance(value, Mapping) and "_target_" in value:
        return _check_target(value, hint, path)
    if (isinstance(value, Mapping) and inner is not Any) or _holds_target(value):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        read = {key: _check(item, inner, (*path, str(key))) for key, item in items}
        return read if isinstance(value, Mapping) else list(read.values())
    if any(get_origin(option) is Target for option in options):
        require(value is None and NoneType in options, name, value, "a group with a _target_")
        return value
    if isinstance(value, Mapping) and not any(o is Any or (get_origin(o) or o) in _MAPPINGS for o in options):
        require(False, name, value, describe_type(hint))
    return check_value(value, hint, name)


def _find_inner_type(hint: Any, value: object) -> Any:
    """What a type declares for the items of a list or mapping; `Any` if it is not declared."""
    wanted = _MAPPINGS if isinstance(value, Mapping) else _SEQUENCES
    for option in map(strip_annotation, list_options(hint)):
        if get_origin(option) in wanted:
            return next((each for each in reversed(get_args(option)) if each is not Ellipsis), Any)
    return Any


def _holds_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(_holds_target, value.values()))
    return isinstance(value, list) and any(map(_holds_target, value))


def _check_target(node: Mapping[str, Any], hint: Any, path: tuple[str, ...]) -> Mapping[str, Any]:
    """Resolve a `_target_` without calling it. Refuse one that does not make what its place needs."""
    where = ".".join((*path, "_target_"))
    wanted = _list_classes(hint)
    if not wanted:
        raise InputError(f"{where} is {abbreviate(node['_target_'])}: no class is allowed here")
    try:
        target = get_object(node["_target_"])
    except Exception as error:  # importing a user's module may raise anything
        raise InputError(f"{where}: {error}") from None
    returned = target if inspect.isclass(target) else _find_returned_class(target)
    rule = f"a {' or '.join(kind.__name__ for kind in wanted)}, or a subclass of it"
    require(returned is not None and issubclass(returned, wanted), where, node["_target_"], rule)
    return _check_keys(node, target, path)


def _list_classes(hint: Any) -> tuple[type, ...]:
    """The classes that a field of this type accepts."""
    classes: list[type] = []
    for option in map(strip_annotation, list_options(hint)):
        origin, arguments = get_origin(option), get_args(option)
        if origin is Target and get_origin(arguments[0]) is Literal:
            classes += [get_class(name) for name in get_args(arguments[0])]
        elif origin is Target:
            classes += _list_classes(arguments[0])
        elif origin is Callable and arguments:
            classes += _list_classes(arguments[-1])
        elif inspect.isclass(option) and option is not Any and option.__module__ != "builtins":
            classes.append(option)
    return tuple(classes)


def _find_returned_class(target: Any) -> type | None:
    """The return type that a function declares. Our own functions are not accepted as targets."""
    if str(getattr(target, "__module__", "")).partition(".")[0] == "mergekit_lab":
        return None
    returned = _read_hints(target).get("return") if callable(target) else None
    return returned if inspect.isclass(returned) else None


def _refuse_unknown(node: Mapping[str, Any], known: Iterable[str], path: tuple[str, ...]) -> None:
    known = list(known)
    for name in node:
        if name not in known:
            key = ".".join((*path, str(name)))
            raise InputError(f"unknown key {key!r} ({_find_origin(key, str(name))}){suggest(str(name), known)}")


def _find_origin(key: str, name: str) -> str:
    """The configuration file that sets a key, as far as its text tells; else the command line."""
    if not HydraConfig.initialized():
        return "in the composed configuration"
    hydra = HydraConfig.get()
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    if any(override.lstrip("+").split("=")[0] == key for override in overrides):
        return "from the command line"
    choices = [
        f"{group.split('@')[0]}/{choice}.yaml" for group, choice in hydra.runtime.choices.items() if choice
    ]
    for source in hydra.runtime.config_sources:
        for file in (f"{hydra.job.config_name}.yaml", *choices):
            path = Path(source.path) / file
            if source.schema == "file" and path.is_file():
                lines = path.read_text().splitlines()
                if any(line.strip().startswith(f"{name}:") for line in lines):
                    return f"in {path}"
    return "in the composed configuration"
