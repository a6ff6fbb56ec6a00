"""Check what the `hydra` keys of a configuration name.

Hydra calls it before the configuration reaches us: callbacks, parts of launchers and sweepers, and handlers,
formatters and filters of logging. A folder of configurations may be somebody else's, so each of them must be of
the kind that belongs in its place.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from traceback import walk_tb
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.experimental.callback import Callback
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mergekit_lab.errors import InputError
from mergekit_lab.ranges import require
from mergekit_lab.yaml_files import UNMADE, explain_yaml

_CALLS = ("_target_", "()", "class")
_LOGGING = (logging.Handler, logging.Formatter, logging.Filter)
_LOGS = ("hydra_logging", "job_logging")
_PLUGINS = ("launcher", "sweeper")
_WHOLE = re.compile(r"\$\{.*\}")


def guard_hydra() -> None:
    """From now on Hydra's own keys are checked whenever it has composed a configuration, and a file that it
    cannot read is named."""
    load = ConfigLoaderImpl.load_configuration

    def load_checked(self: Any, *arguments: Any, **keywords: Any) -> DictConfig:
        try:
            cfg = load(self, *arguments, **keywords)
        except UNMADE as error:
            frames = [frame.f_locals for frame, _ in walk_tb(error.__traceback__)]
            paths = [each["full_path"] for each in frames if "full_path" in each]
            if not paths:
                raise
            raise InputError(f"{paths[-1]} cannot be read as YAML ({explain_yaml(error)})") from None
        check_hydra(cfg)
        return cfg

    ConfigLoaderImpl.load_configuration = load_checked  # type: ignore[method-assign]


def check_hydra(cfg: DictConfig) -> None:
    """Refuse what Hydra would call although it is not one of Hydra's parts.

    Raises:
        InputError: it names the key, and what belongs there.
    """
    for name in ("callbacks", *_PLUGINS, *_LOGS):
        node = OmegaConf.select(cfg, f"hydra.{name}")
        for path, target in _list_calls(node, (name,)) if OmegaConf.is_config(node) else ():
            wanted = _describe_wanted(path)
            require(not wanted or _is_allowed(target, path), f"hydra.{'.'.join(path)}", target, wanted or "")


def _list_calls(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Everything that is named to be called, by its key, including names that are not resolved yet."""
    for key in node if isinstance(node, DictConfig) else range(len(node)):
        if OmegaConf.is_missing(node, key):
            continue
        here = (*path, str(key))
        try:
            value = node[key]
        except OmegaConfBaseException:  # it is made of what Hydra knows later
            raw = str(OmegaConf.to_container(node, resolve=False)[key])  # type: ignore[index]
            if key in _CALLS or _WHOLE.fullmatch(raw):
                yield here, raw
            continue
        if isinstance(value, DictConfig | ListConfig):
            yield from _list_calls(value, here)
        elif key in _CALLS:
            yield here, str(value)


def _describe_wanted(path: tuple[str, ...]) -> str | None:
    """The kind of object that belongs in a place. None if Hydra itself checks it."""
    if path[0] == "callbacks":
        return "a Callback of Hydra, of plain values" if len(path) == 3 else "a plain value"
    if path[0] in _PLUGINS:
        return None if path[1:] == ("_target_",) else "a class of Optuna, or a plain value"
    return "a handler, a formatter or a filter of logging" if path[-1] != "_target_" else None


def _is_allowed(target: str, path: tuple[str, ...]) -> bool:
    try:
        named = get_object(target)
    except Exception:  # importing what a configuration names can raise anything
        return False
    if not inspect.isclass(named):
        return False
    if path[0] == "callbacks":
        return len(path) == 3 and issubclass(named, Callback)
    return named.__module__.split(".")[0] == "optuna" if path[0] in _PLUGINS else issubclass(named, _LOGGING)
