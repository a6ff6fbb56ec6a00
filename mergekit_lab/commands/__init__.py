"""Commands on existing checkpoints, without a run or a store.

A command is a frozen dataclass with a method `run`, or a function. Its fields, or arguments, are the keys of
its configuration `conf/NAME.yaml`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from mergekit_lab.errors import InputError

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

COMMANDS = {
    "merge_checkpoints": "MergeCheckpoints",
    "expand": "expand",
    "extract": "extract",
    "diagnose": "Diagnose",
}
"""The dataclass or function of each command, in the file of the command's name."""
_BASE = "base=<folder, file or hub id>"
_OUT = "out=<folder>"
_NEEDED = {
    "merge_checkpoints": {
        "base": f"{_BASE}, or recipe=merge.yml",
        "experts": "experts=[a,b], experts=@list.txt, or recipe=merge.yml",
        "merger": "merger=ties merger.preset=mergekit, or recipe=merge.yml",
        "out": _OUT,
    },
    "expand": {"low_rank": "low_rank=<folder of factors>", "base": _BASE, "out": _OUT},
    "extract": {"base": _BASE, "expert": "expert=<folder, file or hub id>", "out": _OUT},
    "diagnose": {"base": _BASE, "experts": "experts=[a,b] or experts=@list.txt"},
}
"""What each command cannot do without, and how it is set."""


def refuse_unset(cfg: DictConfig) -> None:
    """Refuse a command without its inputs, before imports that take seconds.

    Raises:
        InputError: a key that is not set.
    """
    from omegaconf import OmegaConf

    settings: Any = OmegaConf.to_container(cfg, resolve=False)
    for key, how in _NEEDED[cfg.command].items():
        spared = settings.get("dry_run") if key == "out" else settings.get("recipe")
        if not settings.get(key) and not spared:
            raise InputError(f"{key} is not set: {how}")


def load_command(name: str) -> Callable[[DictConfig, Path], None]:
    """The function that checks a composed configuration and runs a command. Imports the command's file."""
    from omegaconf import OmegaConf

    from mergekit_lab.schema.check import check_against

    kind = find_command_class(name)

    def run(cfg: DictConfig, folder: Path) -> None:
        check_against(cfg, kind)
        refuse_unset(cfg)
        plain: Any = OmegaConf.to_container(cfg, resolve=True)
        kind(**plain).run(folder)

    return run


def find_command_class(name: str) -> Any:
    """A command's dataclass; of a function one with its arguments."""
    command = getattr(import_module(f"mergekit_lab.commands.{name}"), COMMANDS[name])
    if isinstance(command, type):
        return command
    settings = derive_settings(name, command)

    def run(self: Any, folder: Path) -> None:
        arguments = {key: value for key, value in vars(self).items() if key not in ("command", "run_dir")}
        log.info("wrote %s", command(**arguments))

    settings.run = run
    return settings


def derive_settings(name: str, function: Callable[..., Any], left_out: Sequence[str] = ()) -> Any:
    """A dataclass of a command's keys: the arguments of the function that does the same from Python.

    Args:
        left_out: arguments that are no keys.
    """
    import torch

    from mergekit_lab.merging.devices import Devices
    from mergekit_lab.merging.inputs import Source, Sources

    plain: dict[Any, Any] = {Source: str, str | Path: str, Devices: str | int | list[str | int]}
    plain |= {Sources: Any, Sources | None: Any, str | Path | None: str | None, bool | None: bool}
    plain[str | torch.dtype | None] = str | None
    hints = get_type_hints(function, include_extras=True)
    keys = [(key, plain.get(hint, hint)) for key, hint in hints.items() if key not in {*left_out, "return"}]
    keys = [(key, hint | None if key in _NEEDED[name] else hint) for key, hint in keys]
    return make_dataclass(name, [("command", Literal[name]), *keys, ("run_dir", str)], frozen=True)
