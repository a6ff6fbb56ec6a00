"""What a run needs to download: refuse a run before any work if it is missing, or fetch it.

Stage fetch puts all that a run downloads into one folder, which can be carried to a machine without a network.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from mergekit_lab.backbones import Backbone, OpenClip
from mergekit_lab.checkpoints import explain_unreachable, get_snapshot
from mergekit_lab.errors import InputError
from mergekit_lab.runs.published_experts import find_expert, locate_experts, must_download, parse_expert_id
from mergekit_lab.runs.settle import settle
from mergekit_lab.schema.check import build
from mergekit_lab.schema.stages import ON_DATA, list_stages
from mergekit_lab.tasks import HubImages

log = logging.getLogger(__name__)

USE = "USE.txt"


def refuse_missing(*configs: DictConfig) -> None:
    """Raise before any work if data, weights or experts are missing and cannot be downloaded.

    Args:
        configs: one of a run, or several of a sweep, whose jobs need different things. If at least one job
            lacks nothing, the sweep continues, with a warning about the others. Stages that fetch, or that work
            on inputs of their own, need nothing.

    Raises:
        InputError: something does not exist, or must be downloaded while the hub cannot be reached. The message
            lists everything that is missing, and the ways out.
    """
    needing = [cfg for cfg in configs if not {"store", *ON_DATA} & set(list_stages(cfg)) and cfg.runs is None]
    lists = [_list_lacking(settle(cfg)) for cfg in needing]
    cause = explain_unreachable() if any(missing for missing, _ in lists) else None
    lacking = [[*(missing if cause else ()), *wrong] for missing, wrong in lists]
    lines = list(dict.fromkeys(line for each in lacking for line in each))
    if not lines:
        return
    if cause is None:
        message = "\n".join(lines)
    else:
        listed = "\n".join(f"  {line}" for line in lines)
        what = "run" if len(needing) == 1 else "sweep"
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
        return [], []  # the check of the configuration follows, and its message says more


def list_missing(cfg: DictConfig) -> tuple[list[str], list[str]]:
    """Data sets, weights and experts that must be downloaded, and those that do not exist, one line each.

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
    """The backbone, and the tasks whose data is downloaded."""
    tasks = [
        build(node, HubImages)
        for node in cfg.suite.tasks.values()
        if str(node.get("_target_")).endswith("HubImages")
    ]
    return build(cfg.backbone, Backbone), tasks


def run_fetch(cfg: DictConfig, folder: Path) -> None:
    """Download a run's data sets, weights and experts into `fetch_to`; in a dry run, list them.

    `USE.txt` there says what to add to the command on the other machine. An interrupted fetch continues,
    because the hub's client keeps complete files. Jobs with different backbones may share the folder: weights
    and experts are in subfolders named by architecture.

    Raises:
        InputError: something cannot be downloaded.
    """
    out = Path(cfg.fetch_to).expanduser()
    backbone, tasks = build_parts(cfg)
    if wrong := list_missing(cfg)[1]:
        raise InputError("\n".join(wrong))
    use: list[str] = []
    steps: list[tuple[str, Callable[[], object]]] = []
    for task in tasks:
        target = out / "data" / task.name
        steps.append((f"{task.name}: {target}", partial(_fetch_data, task, target)))
    if tasks:
        use.append("data_root=FOLDER/data")
        use += [f"sources.{task.name}=FOLDER/data/{task.name}" for task in tasks if task.source is not None]
    weights = backbone.source if isinstance(backbone, OpenClip) else None
    if weights is not None and not weights.shipped:
        target = out / "weights" / backbone.architecture
        steps.append((f"weights {weights.name}: {target}", partial(weights.save, target)))
        use.append("backbone.weights=FOLDER/weights")
    if cfg.experts:
        for task in tasks:
            source = find_expert(cfg.experts, backbone, task)
            target = locate_experts(out / "experts", backbone) / task.name
            steps.append((f"expert of {task.name}, {source}: {target}", partial(_fetch_expert, source, target)))
        use.append("experts=FOLDER/experts")
    for what, fetch in steps:
        log.info("%s%s", "would fetch " if cfg.dry_run else "", what)
        if not cfg.dry_run:
            fetch()
    if cfg.dry_run:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / USE).write_text(f"Add to the command, FOLDER being where this folder is:\n\n{' '.join(use)}\n")
    log.info("fetched: %s says what to add to the command there", out / USE)


def _fetch_data(task: HubImages, target: Path) -> None:
    here = task.find_folder()
    if here is None:
        task.download(target)
    else:
        shutil.copytree(here, target, dirs_exist_ok=True)


def _fetch_expert(source: str, target: Path) -> None:
    named = parse_expert_id(source)
    here = Path(source).expanduser()
    if named:
        shutil.copytree(get_snapshot(*named), target, dirs_exist_ok=True)
    elif here.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(here, target.with_name(target.name + here.suffix))
    else:
        shutil.copytree(here, target, dirs_exist_ok=True)
