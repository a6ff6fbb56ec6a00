"""Stage finetune: one expert a task, and the joint model, into the store."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from mergekit_lab.checkpoints import Checkpoint, open_checkpoint, write_tensors
from mergekit_lab.errors import InputError
from mergekit_lab.optim import fit_offset
from mergekit_lab.reporting import Tracker
from mergekit_lab.runs.context import Context
from mergekit_lab.runs.published_experts import import_expert
from mergekit_lab.schema.run import optimizer_factory, wants_fit
from mergekit_lab.store import Artifact
from mergekit_lab.store.store import Workplace
from mergekit_lab.tasks import PARTS, HubImages
from mergekit_lab.training import Settings, TrainingCost, finetune
from mergekit_lab.workers import import_ahead, together

log = logging.getLogger(__name__)
logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)

CURVE = "curve.json"


def stage_finetune(run: Context) -> None:
    """Train, import or find every expert of the run, and the joint model if it is asked for."""
    if run.training.seconds is not None:
        log.info(
            "finetune: a budget of seconds is not reproducible bit for bit: its steps depend on the machine"
        )
    if run.cfg.experts:
        _import(run)
        return
    _decode(run)
    fit = _fit(run) if wants_fit(run.cfg.optimizer) else None
    if run.place.strategy == "auto":
        run.spread(stage_finetune, _missing(run))
    for number, task in enumerate(run.tasks, start=1):
        if run.mine(task):
            train = Training(run, run.optimizer_of(task), run.settings_of(task), fit)
            train.expert(f"expert {number}/{len(run.tasks)} {task}", run.expert_content(task), task)
    if run.cfg.joint and run.mine("+joint"):
        title = f"joint model of {len(run.tasks)} tasks"
        joint = Training(run, run.cfg.optimizer, run.joint_settings, fit)
        _say(title, run.obtain("joint", run.joint_content(), joint.maker(title, list(run.tasks))))


def _decode(run: Context) -> None:
    """Have the images of what is to be trained decoded first, those of the test part too.

    One that cannot be is told of before hours went into training; without it an expert has another key.
    """
    wanted = _missing(run)
    for name, task in run.tasks.items():
        if isinstance(task, HubImages) and (name in wanted or "+joint" in wanted):
            for part in PARTS:
                task.samples(part)


def _missing(run: Context) -> list[str]:
    """What this process would train, the joint model first, for it takes as long as all experts."""
    joint = run.cfg.joint and run.mine("+joint") and not run.store.find("joint", run.joint_content())
    mine = [task for task in run.tasks if run.mine(task)]
    return ["+joint"] * joint + [t for t in mine if not run.store.find("experts", run.expert_content(t))]


def _import(run: Context) -> None:
    """Bring experts that others fine-tuned into the store."""
    if run.cfg.joint:
        raise InputError("with experts= nothing is trained, the joint model included: set joint=false")
    for task in filter(run.mine, run.tasks):
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

    def expert(self, title: str, content: Mapping[str, Any], task: str) -> Artifact:
        artifact = self.run.obtain("experts", content, self.maker(title, [task]))
        _say(title, artifact)
        return artifact

    def maker(self, title: str, tasks: list[str]) -> Callable[[Workplace], Mapping[str, Any]]:
        def make(place: Workplace) -> Mapping[str, Any]:
            budget = self.settings
            told = f"{budget.steps} steps" if budget.seconds is None else f"{budget.seconds:g} seconds"
            if self.run.place.strategy == "auto":
                log.info("%s: training %s", title, told)
                return self.train(tasks, place)
            devices = (self.run.devices * self.run.processes)[: self.run.processes]
            log.info("%s: training %s in %d processes (%s)", title, told, len(devices), self.run.place.strategy)
            optimizer: Any = OmegaConf.to_container(self.optimizer, resolve=True)
            shared = (self.run.plain, str(self.run.folder), dict(self.run.choices))
            own = (optimizer, self.settings, None if self.fit is None else dict(self.fit), tasks, place)
            import_ahead([__name__])
            return together(_train_a_rank, (shared, own), devices)

        return make

    def train(self, tasks: list[str], place: Workplace) -> Mapping[str, Any]:
        """Train on these tasks; where processes train together, every one calls this, and the first writes.

        Where the device's memory is too small, the micro-batches are halved, and training goes on from its last
        checkpoint: the gradient is still that of the whole batch.

        Raises:
            InputError: one sample at a time is too much.
        """
        settings = self.settings
        while True:
            try:
                return self._train(tasks, place, settings)
            except torch.OutOfMemoryError as error:
                smaller = settings.smaller_micro_batches()
                if smaller is None or self.run.place.strategy != "auto":
                    raise InputError(
                        f"training on {', '.join(tasks)} does not fit the device's memory with "
                        f"training.accumulate={settings.accumulate} ({str(error).splitlines()[0]}): raise it, "
                        "lower training.batch_size, or set trainer=fsdp or training.precision=bf16-mixed"
                    ) from None
                log.warning(
                    "out of memory with %d micro-batches a step: trying %d (training.accumulate=%d says so "
                    "from the start)", settings.accumulate, smaller.accumulate, smaller.accumulate,
                )  # fmt: skip
                settings = smaller
            torch.cuda.empty_cache()

    def _train(self, tasks: list[str], place: Workplace, settings: Settings) -> Mapping[str, Any]:
        run = self.run
        prefix = tasks[0] if len(tasks) == 1 else "joint"
        pretrained = run.backbone.model()
        dtypes = {name: tensor.dtype for name, tensor in pretrained.state_dict().items()}
        model = run.parametrization.make_trainable(pretrained, run.seed)
        cost = TrainingCost()
        done = finetune(
            model,
            {task: run.objective(task) for task in tasks},
            optimizer_factory(self.optimizer, settings.steps, self.fit),
            settings,
            seed=run.seed,
            resume=place.resume,
            callbacks=[cost],
            trainer=self._trainer() | {"enable_progress_bar": run.cfg.progress},
            on_metrics=lambda metrics, step: run.tracker.log(
                {f"{prefix}/{name}": value for name, value in metrics.items()}, step
            ),
        )
        if done is None:
            return {}
        model = run.parametrization.make_trainable(run.backbone.model(), run.seed)
        model.load_state_dict(done.state)
        state = {n: t.to(dtypes[n]) for n, t in run.parametrization.fold(model).items()}
        write_tensors(place.out / "model.safetensors", state)
        (place.out / CURVE).write_text(json.dumps(done.curve))
        told = {"val_accuracy": done.val_accuracy, "step": done.step, "accumulate": settings.accumulate}
        return told | cost.measured

    def _trainer(self) -> dict[str, Any]:
        """Lightning's arguments; a process that trains alone does so on the run's device."""
        place = self.run.place
        devices: int | list[int] = self.run.processes
        if place.strategy == "auto":
            on_card = place.accelerator != "cpu" and self.run.device.type == "cuda"
            devices = [self.run.device.index] if on_card else 1
        return asdict(place) | {"devices": devices}


def _train_a_rank(shared: tuple[Any, ...], own: tuple[Any, ...]) -> Mapping[str, Any]:
    """One of the processes that train together: the objects of the run built anew, and no lock."""
    (plain, folder, choices), (optimizer, settings, fit, tasks, place) = shared, own
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    run = Context(OmegaConf.create(plain), Path(folder), choices)
    run.tracker = Tracker()
    return Training(run, OmegaConf.create(optimizer), settings, fit).train(tasks, place)


def train_pilots(run: Context) -> None:
    """The experts of the base optimizer alone, which offsets are fitted to."""
    for number, task in enumerate(run.tasks, start=1):
        if run.mine(task):
            train = Training(run, run.cfg.optimizer.base, run.pilot_settings(task))
            train.expert(f"pilot {number}/{len(run.tasks)} {task}", run.pilot_content(task), task)


def _fit(run: Context) -> Mapping[str, float]:
    """The distribution of the task vectors of the base optimizer's experts, which are trained if need be."""

    def make(place: Workplace) -> Mapping[str, Any]:
        missing = [t for t in run.tasks if not run.store.find("experts", run.pilot_content(t))]
        with run.working_on(list(run.tasks)):
            run.spread(train_pilots, missing)
            train_pilots(run)
        vectors = []
        for task in run.tasks:
            pilot = run.made_earlier("experts", run.pilot_content(task), f"the pilot of {task}", "finetune")
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


def _say(title: str, artifact: Artifact) -> None:
    how = "found in the store" if artifact.reused else f"trained in {artifact.info['wall_seconds']:.0f} s"
    log.info("%s: %s, validation %.1f %%", title, how, 100 * artifact.info["val_accuracy"])
