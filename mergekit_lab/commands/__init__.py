"""What can be done with checkpoints that are there: no run, no store.

A command is a frozen dataclass. Its fields are its configuration, `conf/NAME.yaml`, and `run` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mergekit_lab.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig

COMMANDS = {
    "merge_checkpoints": "MergeCheckpoints",
    "expand": "Expand",
    "extract": "Extract",
    "diagnose": "Diagnose",
}
"""The dataclass of each command, in the file of the command's name."""
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


def list_arguments(command: Any) -> dict[str, Any]:
    """A command's configuration as arguments of the function that does the same from Python."""
    return {name: value for name, value in vars(command).items() if name not in ("command", "run_dir")}


def refuse_unset(cfg: DictConfig) -> None:
    """Refuse a command that lacks what it works on, before seconds of imports.

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
    """What checks a composed configuration and does a command's work; its file is imported now."""
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
    """A command's dataclass."""
    return getattr(import_module(f"mergekit_lab.commands.{name}"), COMMANDS[name])
