"""How a composed configuration is compared with what reads it, before any work.

Hydra refuses a misspelled key on the command line only; keys that come from a file or with `+key=` would be
ignored or fail late. So the composed configuration is compared, key by key, with what takes it: the fields of
a schema's dataclasses, and the signature behind every `_target_`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mergekit_lab.errors import InputError, listing, suggestion

_HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_recursive_", "_convert_"}
_SEQUENCES = (list, tuple, Sequence, Iterable)
_MAPPINGS = (dict, Mapping)
Target = dict
"""Marks a field whose content is built by its `_target_`."""


@dataclass(frozen=True)
class TopLevel:
    """What `main.yaml` itself sets, whichever stage is run; not every stage reads all of it."""

    data_root: str | None
    sources: dict[str, str | None]
    images_limit_gb: float
    fetch_to: str
    experts: Any
    published: list[str]
    mergers: dict[str, Target]
    merger: Target | None
    optimizer_of: dict[str, Target]
    stages: list[str]
    stage: str | None
    seed: int
    joint: bool
    device: Any
    only: list[str] | None
    dry_run: bool
    evaluation_batch_size: int
    progress: bool
    run_dir: str
    runs: str | int | list[str | int] | None
    table: str | None
    metric: str
    objective: str | None


def build(node: Any) -> Any:
    """What a node's `_target_` makes; the object's own complaints come through as they are.

    Raises:
        InputError: the target refuses its arguments.
    """
    try:
        return instantiate(node, _convert_="all")
    except HydraException as error:
        cause = error.__cause__
        if isinstance(cause, InputError):
            raise cause from None
        raise InputError(f"{node.get('_target_')} cannot be built: {cause or error}") from None


def with_floats(cfg: DictConfig, schema: type) -> DictConfig:
    """The configuration with `1.0` for every `1` that is read as a float: keys tell them apart."""
    made: DictConfig = OmegaConf.create(_as_declared(OmegaConf.to_container(cfg, resolve=False), schema))
    OmegaConf.set_struct(made, OmegaConf.is_struct(cfg))
    return made


def _as_declared(value: Any, hint: Any) -> Any:
    options = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    if type(value) is int:
        return float(value) if float in options and int not in options else value
    if isinstance(value, list):
        inner = next((get_args(option)[0] for option in options if get_args(option)), Any)
        return [_as_declared(item, inner) for item in value]
    if not isinstance(value, Mapping):
        return value
    hints = _hints_of(value["_target_"]) if "_target_" in value else {}
    if is_dataclass(hint):
        hints = get_type_hints(hint)
    inner = next((get_args(option)[-1] for option in options if get_origin(option) in (dict, Mapping)), Any)
    return {name: _as_declared(item, hints.get(name, inner)) for name, item in value.items()}


def _hints_of(target: str) -> Mapping[str, Any]:
    """The types of what a target takes, where they can be told."""
    with suppress(Exception):  # one that is not there is refused by the check
        found: Any = get_object(target)
        return get_type_hints(found.__init__ if inspect.isclass(found) and not is_dataclass(found) else found)
    return {}


def check_against(cfg: DictConfig, schema: type) -> None:
    """Refuse every key that no field of the schema reads.

    Raises:
        InputError: an unknown key (with its file and the nearest known one), an interpolation that does not
            resolve, or a value of the wrong kind or range.
    """
    try:
        plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise InputError(f"the configuration does not resolve: {str(error).splitlines()[0]}") from None
    _check_fields(plain, schema, ())


def _check_fields(node: Mapping[str, Any], kind: type, path: tuple[str, ...]) -> None:
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    _refuse_unknown(node, known, path)
    missing = [name for name in known if name not in node and not _has_default(kind, name)]
    if missing:
        raise InputError(f"the configuration lacks {'.'.join((*path, missing[0]))}")
    # groups with ranges first: optimizers interpolate training's values, which are told of by their own name
    for name in sorted(node, key=lambda name: not is_dataclass(hints[name])):
        _check_value(node[name], hints[name], (*path, name))
    if path:
        _construct(kind, node, path)


def _construct(kind: type, node: Mapping[str, Any], path: tuple[str, ...]) -> None:
    """Let the dataclass check its ranges; a wrong type there is a user's mistake too."""
    try:
        kind(**node)
    except TypeError as error:
        raise InputError(f"{'.'.join(path)}: {error}") from None


def _has_default(kind: type, name: str) -> bool:
    return inspect.signature(kind).parameters[name].default is not inspect.Parameter.empty


def _check_value(value: Any, hint: Any, path: tuple[str, ...]) -> None:
    where = ".".join(path)
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise InputError(f"{where} is {value!r}; it must be a group of keys")
        _check_fields(value, hint, path)  # type: ignore[arg-type]
    elif not _fits(value, hint):
        raise InputError(f"{where} is {value!r}; it must be {_called(hint)}")
    elif hint == dict[str, Target]:
        for name, inner in value.items():
            _check_value(inner, Target, (*path, str(name)))
    elif isinstance(value, Mapping) and "_target_" in value:
        _check_target(value, path)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value of a configuration is of the type that a field or a parameter declares."""
    if isinstance(value, Mapping) and "_target_" in value:
        return True  # what it makes is known when it is made
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return any(_fits(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if hint in (Any, None, NoneType):
        return hint is Any or value is None
    if hint is Target:
        return False
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return isinstance(value, list) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if origin in _SEQUENCES or hint in _SEQUENCES:
        inner = arguments[0] if arguments else Any
        return isinstance(value, list) and all(_fits(item, inner) for item in value)
    if origin in _MAPPINGS or hint in _MAPPINGS:
        inner = arguments[-1] if arguments else Any
        return isinstance(value, Mapping) and (inner is Target or all(_fits(v, inner) for v in value.values()))
    if hint is Path:
        return isinstance(value, str)
    if not isinstance(hint, type):
        return True
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _is_finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _called(hint: Any) -> str:
    if hint is Target:
        return "a group with a _target_"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    kind = getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint)
    return f"of type {kind.replace('dict', 'group')}"


def _check_target(node: Mapping[str, Any], path: tuple[str, ...]) -> None:
    try:
        target = get_object(node["_target_"])
    except Exception as error:
        raise InputError(f"{'.'.join(path)}._target_: {error}") from None
    parameters = inspect.signature(target).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    given = {name: value for name, value in node.items() if name not in _HYDRA_KEYS}
    _refuse_unknown(given, parameters, path)
    hints = _hints_of(node["_target_"])
    for name, value in given.items():
        where = ".".join((*path, name))
        if isinstance(value, Mapping) and "_target_" in value:
            _check_target(value, (*path, name))
        elif name == "coefficient" and value is None:
            continue  # validation chooses it
        elif not _fits(value, hints.get(name, Any)):
            raise InputError(f"{where} is {value!r}; it must be {_called(hints[name])}")
        elif not _is_finite(value):
            raise InputError(f"{where} is {value!r}; it must be finite")


def _refuse_unknown(node: Mapping[str, Any], known: Iterable[str], path: tuple[str, ...]) -> None:
    known = list(known)
    for name in node:
        if name not in known:
            key = ".".join((*path, str(name)))
            raise InputError(f"unknown key {key!r} ({_origin(key, str(name))}){suggestion(str(name), known)}")


def _origin(key: str, name: str) -> str:
    """The configuration file that sets a key, as far as its text tells; else the command line."""
    if not HydraConfig.initialized():
        return "in the composed configuration"
    hydra = HydraConfig.get()
    if any(override.lstrip("+").split("=")[0] == key for override in hydra.overrides.task):
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


def check_slice(cfg: DictConfig) -> None:
    """Refuse a `table` and a `metric` that the report could not draw, before any work.

    Raises:
        InputError: unknown names, or mergers that are no dimension though one run has many.
    """
    from mergekit_lab.reporting import parse_table

    names, fixed = parse_table(cfg.table or "merger×task", cfg.metric)
    if cfg.table and cfg.runs is None and "merger" not in (*names, *fixed):
        raise InputError(
            f"table={cfg.table}: the report of a run has many mergers: make merger one of the two, or fix one, "
            f"table={cfg.table}@merger:NAME"
        )


def without_null_coefficient(node: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The node without `coefficient: null` (at its top, or in its `inner`), and whether there was one."""
    kept = {name: value for name, value in node.items() if not (name == "coefficient" and value is None)}
    found = len(kept) < len(node)
    if isinstance(kept.get("inner"), dict):
        kept["inner"], inner_found = without_null_coefficient(kept["inner"])
        found = found or inner_found
    return kept, found


def stage_list(cfg: DictConfig, known: Iterable[str]) -> list[str]:
    """The stages asked for, `stage=X` before `stages=[…]`.

    Raises:
        InputError: an unknown stage.
    """
    known = list(known)
    wanted = [cfg.stage] if cfg.stage else list(cfg.stages or ())
    for name in wanted:
        if name not in known:
            raise InputError(f"there is no stage {name!r}{suggestion(name, known)}")
    if not wanted:
        raise InputError(f"stages is empty; known: {listing(known)}")
    return wanted
