"""Describe how this process makes its results, for the report: command, versions, machine."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from mergekit_lab import __version__
from mergekit_lab.machine import count_cores
from mergekit_lab.reporting import Origin

_PACKAGES = ("torch", "transformers", "open_clip_torch", "lightning")


def describe_origin(arguments: Sequence[str], devices: Sequence[str] = (), *, sweep: bool = False) -> Origin:
    """The origin of what this process reports.

    Args:
        arguments: overrides, as on the command line.
        devices: of the run.
        sweep: the command was a sweep (`--multirun`).
    """
    versions = {"mergekit_lab": __version__, "Python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in _PACKAGES}
    options = [*_list_config_dirs(), *(["--multirun"] if sweep else [])]
    return Origin(
        (*options, *arguments),
        datetime.now().astimezone().isoformat(timespec="seconds"),
        versions,
        f"{platform.system()} {platform.machine()}, {count_cores()} cores",
        tuple(dict.fromkeys(map(_name_device, devices))),
    )


def _name_device(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _list_config_dirs() -> list[str]:
    """`--config-dir=PATH` for each folder of a user's own configurations."""
    if not HydraConfig.initialized():
        return []
    sources = HydraConfig.get().runtime.config_sources
    return [f"--config-dir={Path(each.path)}" for each in sources if each.provider == "command-line"]
