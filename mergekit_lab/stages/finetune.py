"""Stage finetune: one expert a task, and the joint model, into the store."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from mergekit_lab.checkpoints import Checkpoint, open_checkpoint, write_tensors
from mergekit_lab.errors import InputError
from mergekit_lab.optim import fit_offset
from mergekit_lab.stages.config import optimizer_factory, wants_fit
from mergekit_lab.stages.context import Context
from mergekit_lab.stages.published_experts import import_expert
from mergekit_lab.store import Artefact
from mergekit_lab.store.store import Workplace
from mergekit_lab.training import Settings, TrainingCost, finetune

log = logging.getLogger(__name__)
logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)

CURVE = "curve.json"


def stage_finetune(run: Context) -> None:
    if run.settings.seconds is not None:
        log.info(
            "finetune: a budget of seconds is not reproducible bit for bit: its steps depend on the machine"
        )
    if run.cfg.experts:
        _import(run)
        return
    fit = _fit(run) if wants_fit(run.cfg.optimizer) else None
    train = Training(run, run.cfg.optimizer, run.settings, fit)
    for number, task in enumerate(run.tasks, start=1):
        train.expert(f"expert {number}/{len(run.tasks)} {task}", run.expert_content(task), task)
    if run.cfg.joint:
        title = f"joint model of {len(run.tasks)} tasks"
        joint = Training(run, run.cfg.optimizer, run.joint_settings, fit)
        _say(title, run.obtain("joint", run.joint_content(), joint.maker(title, list(run.tasks))))


def _import(run: Context) -> None:
    """Bring experts that others fine-tuned into the store."""
    if run.cfg.joint:
        raise InputError("with experts= nothing is trained, the joint model included: set joint=false")
    for task in run.tasks:
        source = run.expert_source(task)
        assert source is not None
        made = run.obtain(
            "experts",
            run.expert_content(task),
            lambda place, source=source, task=task: import_expert(source, run.base_state, task, place.out),
        )
        log.info("expert %s: %s", task, "found in the store" if made.reused else f"from {source}")


@dataclass(frozen=True)
class Training:
    """How models of a run are trained.

    Attributes:
        optimizer: its configuration.
        settings: planned.
        fit: `loc` and `scale` of offsets that are fitted, else None.
    """

    run: Context
    optimizer: DictConfig
    settings: Settings
    fit: Mapping[str, float] | None = None

    def expert(self, title: str, content: Mapping[str, Any], task: str) -> Artefact:
        artefact = self.run.obtain("experts", content, self.maker(title, [task]))
        _say(title, artefact)
        return artefact

    def maker(self, title: str, tasks: list[str]) -> Callable[[Workplace], Mapping[str, Any]]:
        run, settings = self.run, self.settings

        def make(place: Workplace) -> Mapping[str, Any]:
            budget = f"{settings.steps} steps" if settings.seconds is None else f"{settings.seconds:g} seconds"
            log.info("%s: training %s", title, budget)
            prefix = tasks[0] if len(tasks) == 1 else "joint"
            model = run.parametrisation.trainable(run.backbone.model(), run.seed)
            cost = TrainingCost()
            done = finetune(
                model,
                {task: run.objective(task) for task in tasks},
                optimizer_factory(self.optimizer, settings.steps, self.fit),
                settings,
                seed=run.seed,
                resume=place.resume,
                callbacks=[cost],
                trainer={**run.plain["trainer"], "enable_progress_bar": run.cfg.progress},
                on_metrics=lambda metrics, step: run.tracker.log(
                    {f"{prefix}/{name}": value for name, value in metrics.items()}, step
                ),
            )
            model.cpu().load_state_dict(done.state)
            write_tensors(place.out / "model.safetensors", run.parametrisation.folded(model))
            (place.out / CURVE).write_text(json.dumps(done.curve))
            return {"val_accuracy": done.val_accuracy, "step": done.step} | cost.measured

        return make


def _fit(run: Context) -> Mapping[str, float]:
    """The distribution of the task vectors of the base optimizer's experts, which are trained if need be."""

    def make(place: Workplace) -> Mapping[str, Any]:
        train = Training(run, run.cfg.optimizer.base, run.pilot_settings)
        vectors = []
        for number, task in enumerate(run.tasks, start=1):
            pilot = train.expert(f"pilot {number}/{len(run.tasks)} {task}", run.pilot_content(task), task)
            vectors.append(_TaskVector(open_checkpoint(pilot.file("model.safetensors"), task), run.base_state))
        moved = [name for name in run.base_state if any(bool(vector[name].any()) for vector in vectors)]
        for vector in vectors:
            vector.names = moved
        return asdict(fit_offset(vectors, run.cfg.optimizer.distribution))

    found = run.obtain("fits", run.fit_content(), make).info
    log.info(
        "offsets: %s, loc %.2e, scale %.2e, Kolmogorov-Smirnov distance %.3f, mean log-likelihood %.3f",
        *(found[name] for name in ("distribution", "loc", "scale", "ks_distance", "mean_log_likelihood")),
    )
    return found


class _TaskVector(Mapping[str, Tensor]):
    """An expert's change of the base by name, read when it is asked for."""

    def __init__(self, expert: Checkpoint, base: Mapping[str, Tensor]) -> None:
        self.expert = expert
        self.base = base
        self.names = list(base)

    def __getitem__(self, name: str) -> Tensor:
        return self.expert[name] - self.base[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _say(title: str, artefact: Artefact) -> None:
    how = "found in the store" if artefact.reused else f"trained in {artefact.info['wall_seconds']:.0f} s"
    log.info("%s: %s, validation %.1f %%", title, how, 100 * artefact.info["val_accuracy"])
