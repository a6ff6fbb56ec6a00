"""Stage fetch: all that a run downloads, into one folder to carry to a machine without a network."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from mergekit_lab.backbones import OpenClip
from mergekit_lab.checkpoints import get_snapshot
from mergekit_lab.errors import InputError
from mergekit_lab.runs.preflight import build_parts, list_missing
from mergekit_lab.runs.published_experts import find_expert, locate_experts, parse_expert_id
from mergekit_lab.tasks import HubImages

log = logging.getLogger(__name__)

USE = "USE.txt"


def run_fetch(cfg: DictConfig) -> Path:
    """Download data sets, weights and experts of a run's configuration; of a dry run, list them.

    An interrupted fetch continues: the hub's client keeps complete files. Jobs that differ in their backbones
    may share the folder: weights and experts lie below the architecture's name.

    Returns:
        The folder. `USE.txt` in the folder says what to add to the command on the other machine.

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
        return out
    out.mkdir(parents=True, exist_ok=True)
    (out / USE).write_text(f"Add to the command, FOLDER being where this folder is:\n\n{' '.join(use)}\n")
    log.info("fetched: %s says what to add to the command there", out / USE)
    return out


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
