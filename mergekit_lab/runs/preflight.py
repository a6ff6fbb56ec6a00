"""What a run needs from elsewhere, asked before anything is imported that is not needed to ask.

A machine without a network learns in seconds what is missing and how to bring it, not after hours of training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from omegaconf import DictConfig

from mergekit_lab.backbones import Backbone, OpenClip
from mergekit_lab.checkpoints import explain_unreachable
from mergekit_lab.errors import InputError
from mergekit_lab.runs.published_experts import find_expert, must_download
from mergekit_lab.schema.check import build
from mergekit_lab.tasks import HubImages

log = logging.getLogger(__name__)


def refuse_missing(*configs: DictConfig) -> None:
    """Raise before any work if data, weights or experts are neither here nor to be had.

    Args:
        configs: of a run; or of those jobs of a sweep that differ in what they need. While one of them lacks
            nothing the sweep goes on, with a warning of what the others will be refused for.

    Raises:
        InputError: something that was named does not exist, or the hub cannot be reached; the message lists
            everything that is missing, and the ways out.
    """
    lists = [_list_lacking(cfg) for cfg in configs]
    cause = explain_unreachable() if any(missing for missing, _ in lists) else None
    lacking = [[*(missing if cause else ()), *wrong] for missing, wrong in lists]
    lines = list(dict.fromkeys(line for each in lacking for line in each))
    if not lines:
        return
    if cause is None:
        message = "\n".join(lines)
    else:
        listed = "\n".join(f"  {line}" for line in lines)
        what = "run" if len(configs) == 1 else "sweep"
        message = (
            f"{len(lines)} missing for this {what}, and the hub cannot be reached ({cause}):\n"
            f"{listed}\nWith a network, run the same command with stage=fetch fetch_to=FOLDER, "
            "copy FOLDER here, and add what FOLDER/USE.txt says. Without any download: "
            "python -m mergekit_lab +experiment=quickstart"
        )
    if all(lacking):
        raise InputError(message)
    log.warning("some jobs will be refused: %s", message)


def _list_lacking(cfg: DictConfig) -> tuple[list[str], list[str]]:
    try:
        return list_missing(cfg)
    except InputError:
        return [], []  # what cannot be built is refused by the check of the configuration, which knows more


def list_missing(cfg: DictConfig) -> tuple[list[str], list[str]]:
    """What would have to be downloaded, and what is wrong: data sets, weights and experts, one line each.

    Raises:
        InputError: the backbone or a task cannot be built.
    """
    backbone, tasks = build_parts(cfg)
    asked: list[Callable[[], str | None]] = [task.find_missing for task in tasks]
    if isinstance(backbone, OpenClip) and backbone.source:
        asked.append(backbone.source.find_missing)
    if cfg.get("experts"):
        asked += [
            partial(_check_expert, cfg.experts, backbone, task)
            for task in tasks
            if not cfg.only or task.name in cfg.only
        ]
    missing, wrong = [], []
    for ask in asked:
        try:
            missing.append(ask())
        except InputError as error:
            wrong.append(str(error))
    return list(filter(None, missing)), list(dict.fromkeys(wrong))


def _check_expert(experts: Any, backbone: Any, task: HubImages) -> str | None:
    source = find_expert(experts, backbone, task)
    return f"expert {source} of the hub" if must_download(source) else None


def build_parts(cfg: DictConfig) -> tuple[Any, list[HubImages]]:
    """The backbone, and those tasks whose data comes from elsewhere."""
    tasks = [
        build(node, HubImages)
        for node in cfg.suite.tasks.values()
        if str(node.get("_target_")).endswith("HubImages")
    ]
    return build(cfg.backbone, Backbone), tasks
