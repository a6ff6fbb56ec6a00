"""Stage finetune: one expert a task, and the joint model, into the store."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.stages.config import optimizer_factory
from mergekit_lab.stages.context import Context
from mergekit_lab.store import Artefact
from mergekit_lab.store.store import Workplace
from mergekit_lab.training import Settings, finetune

log = logging.getLogger(__name__)
logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)

CURVE = "curve.json"


def stage_finetune(run: Context) -> None:
    for number, task in enumerate(run.tasks, start=1):
        title = f"expert {number}/{len(run.tasks)} {task}"
        _say(title, run.obtain("experts", run.expert_content(task), _maker(run, title, [task], run.settings)))
    if run.cfg.joint:
        title = f"joint model of {len(run.tasks)} tasks"
        _say(
            title,
            run.obtain("joint", run.joint_content(), _maker(run, title, list(run.tasks), run.joint_settings)),
        )


def _maker(run: Context, title: str, tasks: list[str], settings: Settings) -> Any:
    def make(place: Workplace) -> Mapping[str, Any]:
        log.info("%s: training %d steps", title, settings.steps)
        prefix = tasks[0] if len(tasks) == 1 else "joint"
        done = finetune(
            run.backbone.image_encoder(),
            {task: run.head(task) for task in tasks},
            {task: run.tasks[task].split("train") for task in tasks},
            {task: run.tasks[task].split("validation") for task in tasks},
            optimizer_factory(run.cfg, settings.steps),
            settings,
            seed=run.seed,
            resume=place.resume,
            trainer={**run.plain["trainer"], "enable_progress_bar": run.cfg.progress},
            on_metrics=lambda metrics, step: run.tracker.log(
                {f"{prefix}/{name}": value for name, value in metrics.items()}, step
            ),
        )
        write_tensors(place.out / "model.safetensors", done.state)
        (place.out / CURVE).write_text(json.dumps(done.curve))
        return {"val_accuracy": done.val_accuracy, "step": done.step}

    return make


def _say(title: str, artefact: Artefact) -> None:
    how = "found in the store" if artefact.reused else f"trained in {artefact.info['wall_seconds']:.0f} s"
    log.info("%s: %s, validation %.1f %%", title, how, 100 * artefact.info["val_accuracy"])
