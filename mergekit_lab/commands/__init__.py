"""What can be done with checkpoints that are there: no run, no store.

A command is a frozen dataclass. Its fields are its configuration, `conf/NAME.yaml`, and `run` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def load_command(name: str) -> Callable[[DictConfig, Path], None]:
    """What checks a composed configuration and does a command's work; its file is imported now."""
    from omegaconf import OmegaConf

    from mergekit_lab.schema.check import check_against

    kind = command_class(name)

    def run(cfg: DictConfig, folder: Path) -> None:
        check_against(cfg, kind)
        plain: Any = OmegaConf.to_container(cfg, resolve=True)
        kind(**plain).run(folder)

    return run


def command_class(name: str) -> Any:
    """A command's dataclass."""
    return getattr(import_module(f"mergekit_lab.commands.{name}"), COMMANDS[name])
