"""Stage fetch: all that a run downloads, into one folder to carry to a machine without a network."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from omegaconf import DictConfig

from mergekit_lab.backbones import OpenClip
from mergekit_lab.checkpoints import fetch_snapshot
from mergekit_lab.stages.preflight import parts
from mergekit_lab.stages.published_experts import expert_source

log = logging.getLogger(__name__)

USE = "USE.txt"


def run_fetch(cfg: DictConfig) -> Path:
    """Download data sets, weights and experts of a run's configuration.

    A fetch that was cut goes on where it was: the hub's client keeps what is complete.

    Returns:
        The folder. `USE.txt` in it says what to add to the command where it is carried to.

    Raises:
        InputError: something cannot be downloaded.
    """
    out = Path(cfg.fetch_to).expanduser()
    backbone, tasks = parts(cfg)
    use = []
    for task in tasks:
        place = out / "data" / task.name
        log.info("%s: %s", task.name, place)
        here = task.folder()
        if here is None:
            task.download(place)
        else:
            shutil.copytree(here, place, dirs_exist_ok=True)
    if tasks:
        use.append("data_root=FOLDER/data")
        use += [f"sources.{task.name}=FOLDER/data/{task.name}" for task in tasks if task.source is not None]
    if isinstance(backbone, OpenClip) and backbone.source is not None and not backbone.source.shipped:
        place = out / "weights" / backbone.architecture
        log.info("weights: %s", place)
        file = backbone.source.save(place)
        use.append(f"backbone.weights=FOLDER/{file.relative_to(out)}")
    if cfg.experts:
        for task in tasks:
            place = out / "experts" / task.name
            log.info("expert of %s: %s", task.name, place)
            _fetch_expert(expert_source(cfg.experts, backbone, task), place)
        use.append("experts=FOLDER/experts")
    out.mkdir(parents=True, exist_ok=True)
    (out / USE).write_text(f"Add to the command, FOLDER being where this folder is:\n\n{' '.join(use)}\n")
    log.info("fetched: %s says what to add to the command there", out / USE)
    return out


def _fetch_expert(source: str, place: Path) -> None:
    here = Path(source).expanduser()
    if here.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(here, place.with_name(place.name + here.suffix))
    elif here.is_dir():
        shutil.copytree(here, place, dirs_exist_ok=True)
    else:
        fetch_snapshot(source, place)
