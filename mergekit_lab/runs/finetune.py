"""Stage finetune: train or import the experts and the joint model.

Artifacts declared here: `experts` (also the pilots that offsets are fitted to), `fits`, `joint`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from mergekit_lab.checkpoints import Checkpoint, open_checkpoint
from mergekit_lab.errors import InputError
from mergekit_lab.optim import fit_offset
from mergekit_lab.runs.nodes import Node, declare
from mergekit_lab.runs.own_code import describe_code
from mergekit_lab.runs.published_experts import find_expert, import_expert, read_import_content
from mergekit_lab.runs.run import MODEL, Run, say_seconds
from mergekit_lab.runs.train import Training
from mergekit_lab.schema.run import count_evaluations_a_step, wants_fit
from mergekit_lab.store import Artifact, Workspace
from mergekit_lab.tasks import PARTS, HubImages
from mergekit_lab.training import TrainingSettings
from mergekit_lab.training.settings import describe_machine

log = logging.getLogger(__name__)

_OF_PROCESSES = {"per_rank": True, "sync_ascent": False}
"""With these settings of an optimizer, the number of processes changes the result."""


@declare
def declare_expert(run: Run, task: str) -> Node:
    """The expert of a task: trained, or imported if the run sets `experts`."""
    if run.plain["experts"]:
        return _declare_imported(run, task)
    return _declare_training(run, "expert", [task], find_optimizer(run, task))


@declare
def declare_pilot(run: Run, task: str) -> Node:
    """A task's expert trained by the base optimizer. Offsets are fitted to the pilots of all tasks."""
    return _declare_training(run, "pilot", [task], run.cfg.optimizer.base)


@declare
def declare_joint(run: Run) -> Node:
    """One model of all tasks, with the budget of all experts together."""
    return _declare_training(run, "joint model", run.experts, run.cfg.optimizer)


def _declare_training(run: Run, what: str, tasks: Sequence[str], optimizer: DictConfig) -> Node:
    fits = (declare_fit(run),) if wants_fit(optimizer) else ()
    if what == "joint model":
        kind, label, title, unit = "joint", what, f"{what} of {len(tasks)} tasks", "+joint"
        settings = plan_joint_settings(run)
    else:
        (unit,) = tasks
        kind, label = "experts", f"{what} of {unit}"
        title = f"{what} {run.experts.index(unit) + 1}/{len(run.experts)} {unit}"
        settings = plan_settings(run, unit, optimizer)

    def make(workspace: Workspace) -> Mapping[str, Any]:
        fit = run.need(fits[0]).info if fits else None
        return Training(run, title, tasks, optimizer, settings, fit).make(workspace)

    def say(trained: Artifact) -> str:
        return f"{label}: {say_seconds(trained)}, validation {100 * trained.info['val_accuracy']:.1f} %"

    return Node(
        kind, f"the {label}", "finetune", unit,
        decide=lambda: _describe_training(run, settings, _describe_optimizer(run, optimizer))
        | ({"tasks": tasks, "data": run.describe_data(tasks)} | _describe_learning(run, tasks)
           if kind == "joint" else _describe_task(run, unit)),
        make=make,
        needs=fits,
        say=say,
    )  # fmt: skip


def _declare_imported(run: Run, task: str) -> Node:
    sources, learned = run.plain["experts"], task in run.learned
    source = find_expert(sources, run.backbone, run.tasks[task]) if learned else sources[task]

    def say(expert: Artifact) -> str:
        origin = "found in the store" if expert.reused else f"from {expert.info['source']}"
        return f"expert {task}: {origin}"

    return Node(
        "experts", f"the expert of {task}", "finetune", task,
        decide=lambda: read_import_content(source, run.base_content, task if learned else "")
        | {"finetuning": run.plain["finetuning"]} | (_describe_task(run, task) if learned else {}),
        make=lambda workspace: import_expert(source, run.backbone, run.base_state, task, workspace.out),
        say=say,
    )  # fmt: skip


@declare
def declare_fit(run: Run) -> Node:
    """The distribution of the pilots' task vectors, which offsets are drawn from."""
    pilots = tuple(declare_pilot(run, task) for task in run.experts)
    return Node(
        "fits", "the fit of the offsets", "finetune", None,
        decide=lambda: {
            "distribution": run.plain["optimizer"]["distribution"],
            "pilots": _describe_optimizer(run, run.cfg.optimizer)["pilots"],
        },
        make=lambda workspace: _make_fit(run, pilots),
        needs=pilots,
        say=lambda fit: (
            "offsets: {distribution}, loc {loc:.2e}, scale {scale:.2e}, Kolmogorov-Smirnov distance "
            "{ks_distance:.3f}, mean log-likelihood {mean_log_likelihood:.3f}".format(**fit.info)
        ),
    )  # fmt: skip


def finetune_nodes(run: Run) -> list[Node]:
    """The stage's results. `walk` adds what they need."""
    return [
        *(declare_expert(run, task) for task in run.experts),
        *([declare_joint(run)] if run.cfg.joint else []),
    ]


def find_optimizer(run: Run, task: str) -> DictConfig:
    """The configuration of the optimizer that trains a task's expert."""
    return run.cfg.optimizer_of.get(task, run.cfg.optimizer)


def plan_settings(run: Run, task: str, optimizer: DictConfig | None = None) -> TrainingSettings:
    """A task's planned settings, with its optimizer or another."""
    settings = run.training
    if settings.epochs is not None or settings.epochs_of:
        settings = settings.resolve_epochs(task, run.tasks[task].count("train"))
    return settings.plan(count_evaluations_a_step(optimizer or find_optimizer(run, task)))


def plan_joint_settings(run: Run) -> TrainingSettings:
    """The budget of all experts together."""
    return TrainingSettings.combine([plan_settings(run, task, run.cfg.optimizer) for task in run.experts])


def _describe_training(run: Run, settings: TrainingSettings, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    content = {
        "backbone": run.base_content,
        "finetuning": run.plain["finetuning"],
        "optimizer": optimizer,
        "training": settings.describe_content(),
        "seed": run.seed,
    }
    if run.processes > 1 and any(optimizer.get(name) is value for name, value in _OF_PROCESSES.items()):
        content["processes"] = run.processes
    if settings.seconds is not None:
        content["machine"] = describe_machine(run.plain["trainer"]["accelerator"])
    return content | describe_code(optimizer, run.plain["finetuning"])


def _describe_optimizer(run: Run, optimizer: DictConfig) -> dict[str, Any]:
    """The optimizer's configuration, with the keys of the pilots if its offsets are fitted to them."""
    plain: Any = OmegaConf.to_container(optimizer, resolve=True)
    if wants_fit(optimizer):
        plain["pilots"] = {task: declare_pilot(run, task).key for task in run.experts}
    return plain


def _describe_task(run: Run, task: str) -> dict[str, Any]:
    return {"task": task, "data": run.tasks[task].fingerprint()} | _describe_learning(run, [task])


def _describe_learning(run: Run, tasks: Sequence[str]) -> dict[str, Any]:
    """How the backbone learns these tasks, if it has more than one way.

    Scoring is part of it only if validation chooses which weights are kept.
    """
    content: dict[str, Any] = {}
    for task in tasks:
        how = run.backbone.describe_learning(run.tasks[task])
        if run.training.keep == "best":
            how = how | run.describe_scoring(task)
        if how:
            content[task] = how
    return {"learning": content} if content else {}


def stage_finetune(run: Run) -> None:
    """Train, import or find every expert of the run, and the joint model if it is asked for."""
    if run.cfg.experts and run.cfg.joint:
        raise InputError("with experts= nothing is trained, the joint model included: set joint=false")
    nodes = finetune_nodes(run)
    if run.cfg.experts:
        run.make(None, nodes)
        return
    if run.training.seconds is not None:
        log.info(
            "finetune: a budget of seconds is not reproducible bit for bit: its steps depend on the machine"
        )
    _decode(run, nodes)
    if wants_fit(run.cfg.optimizer):
        run.make(None, [declare_fit(run)])
    _train(run, stage_finetune, nodes)


def _decode(run: Run, nodes: Sequence[Node]) -> None:
    """Decode the images of all parts before training, so that a damaged image is found before hours of work.

    Leaving such an image out would change the experts' keys.
    """
    missing = {node.unit for node in nodes if run.is_mine(node.unit) and not run.find(node)}
    for name, task in run.tasks.items():
        if isinstance(task, HubImages) and missing & {name, "+joint"}:
            for part in PARTS:
                task.load_samples(part)


def train_pilots(run: Run) -> None:
    """Train the experts of the base optimizer, to which offsets are fitted."""
    _train(run, train_pilots, declare_fit(run).needs)


def _train(run: Run, stage: Callable[[Run], None], nodes: Sequence[Node]) -> None:
    """Train or find what is this process's. Experts are spread over devices unless one training takes all."""
    run.make(stage if run.trainer.strategy == "auto" else None, nodes)


def _make_fit(run: Run, pilots: Sequence[Node]) -> Mapping[str, Any]:
    """Fit the distribution of the pilots' task vectors. Missing pilots are trained first."""
    with run.work_on(run.experts):
        train_pilots(run)
    files = [(node.unit or "", run.need(node).find_file(MODEL)) for node in pilots]
    experts = [open_checkpoint(file, task) for task, file in files]
    base = run.base_state
    changed = [n for n, tensor in base.items() if any(not torch.equal(expert[n], tensor) for expert in experts)]
    vectors = [_TaskVector(expert, base, changed) for expert in experts]
    return asdict(fit_offset(vectors, run.cfg.optimizer.distribution))


@dataclass(frozen=True)
class _TaskVector:
    """An expert's task vector, computed tensor by tensor whenever `fit_offset` iterates over it."""

    expert: Checkpoint
    base: Mapping[str, Tensor]
    names: Sequence[str]

    def __iter__(self) -> Iterator[Tensor]:
        return (self.expert[name] - self.base[name] for name in self.names)
