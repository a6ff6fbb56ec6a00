"""What a run needs from elsewhere, asked before anything is imported that is not needed to ask.

A machine without a network learns in seconds what is missing and how to bring it, not after hours of training.
"""

from __future__ import annotations

import logging
from typing import Any

from omegaconf import DictConfig

from mergekit_lab.backbones import OpenClip
from mergekit_lab.checkpoints import unreachable
from mergekit_lab.errors import InputError
from mergekit_lab.stages.checking import build
from mergekit_lab.stages.published_experts import expert_missing, expert_source
from mergekit_lab.tasks import HubImages

log = logging.getLogger(__name__)


def refuse_missing(cfg: DictConfig) -> None:
    """Raise before any work if data, weights or experts are neither here nor to be had.

    Raises:
        InputError: the hub cannot be reached; the message lists everything that is missing, and the ways out.
    """
    try:
        missing = list_missing(cfg)
    except InputError:
        return  # what cannot be built is refused by the check of the configuration, which knows more
    cause = unreachable() if missing else None
    if cause is None:
        return
    lines = "\n".join(f"  {what}" for what in missing)
    raise InputError(
        f"{len(missing)} things this run needs are not here, and the hub cannot be reached ({cause}):\n"
        f"{lines}\nOn a machine with a network run the same command with stage=fetch fetch_to=FOLDER, carry "
        "FOLDER here and add what FOLDER/USE.txt says. Without any download: "
        "python -m mergekit_lab +experiment=quickstart"
    )


def list_missing(cfg: DictConfig) -> list[str]:
    """What would have to be downloaded: data sets, weights and experts, one line each."""
    backbone, tasks = parts(cfg)
    found = [task.whence() for task in tasks if task.folder() is None]
    if isinstance(backbone, OpenClip) and backbone.source and (weights := backbone.source.missing()):
        found.append(weights)
    if cfg.get("experts"):
        sources = [expert_source(cfg.experts, backbone, task) for task in tasks]
        found += [f"expert {source} of the hub" for source in sources if expert_missing(source)]
    return found


def parts(cfg: DictConfig) -> tuple[Any, list[HubImages]]:
    """The backbone, and those tasks whose data comes from elsewhere."""
    tasks = [
        build(node) for node in cfg.suite.tasks.values() if str(node.get("_target_")).endswith("HubImages")
    ]
    return build(cfg.backbone), tasks
