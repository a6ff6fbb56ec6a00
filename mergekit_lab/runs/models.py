"""The models that a run evaluates, and the evaluation of one model on one part of one task.

Artifacts declared here: `evaluations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from mergekit_lab.backbones import Backbone, LanguageModel
from mergekit_lab.checkpoints import LowRank, open_checkpoint
from mergekit_lab.errors import InputError, suggest
from mergekit_lab.evaluation import score, score_with_harness
from mergekit_lab.memory import read_peak_memory, reset_peak_memory
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.mergers import Merger
from mergekit_lab.runs.nodes import Node, declare
from mergekit_lab.runs.run import Run, load_state
from mergekit_lab.store import Artifact, Workspace, make_key
from mergekit_lab.tasks import HarnessTask, Part

TASK_FACTORS = "tasks"
"""The folder, in a merged artifact, of the factors from which each task's own model is made."""
SAMPLES = "samples.npy"
"""The file with one number per sample, whose mean is the value. Absent if the value is not a mean."""
SAMPLES_OF_METRICS = "samples.npz"
"""The file with such numbers for each of lm-evaluation-harness's metrics."""


@dataclass(frozen=True)
class Model:
    """A model that is evaluated.

    Attributes:
        kind: "zero_shot", "expert", "checkpoint", "joint" or "merged".
        tasks: what it is evaluated on.
        node: the artifact that holds its weights; None: the weights are a backbone's own.
        merger: the merger that makes it, if any.
        name: the name of a checkpoint.
        backbone: the backbone that it brings; None: the run's.
    """

    kind: str
    tasks: tuple[str, ...]
    node: Node | None = None
    merger: Merger | None = None
    name: str | None = None
    backbone: Backbone | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.merger.label if self.merger else self.name or self.kind

    def describe_base(self, run: Run) -> dict[str, Any]:
        """What decides its base: its own backbone, or the run's."""
        return run.describe_backbone(self.backbone) if self.backbone else run.base_content

    def find_key(self, run: Run) -> str:
        """The key that stands for it in the contents of evaluations."""
        return self.node.key if self.node else make_key({"base": self.describe_base(run)})

    def read_state(self, run: Run, task: str) -> Mapping[str, Tensor]:
        """Its weights under the run's backbone's names; if there is one model per task, those for `task`."""
        if self.node is None:
            return run.base_state
        artifact = run.need(self.node)
        if self.merger is not None and self.merger.method.by_task:
            base = open_checkpoint(run.base_state, "the base")
            return LowRank(artifact.folder / TASK_FACTORS, base, f"the model of {self.merger.label}", [task])
        return load_state(artifact)

    def load(self, run: Run, task: str) -> nn.Module:
        """The model on the run's device: `run.model` with its weights, or a new one of its own backbone."""
        if self.backbone:
            return self.backbone.make_model().to(run.device)
        by_task = self.merger is not None and self.merger.method.by_task
        weights = f"{self.find_key(run)} {task if by_task else ''}"
        if _LOADED.get(run.model) != (weights, _count_writes(run.model)):
            run.load_weights(self.read_state(run, task))
            _LOADED[run.model] = weights, _count_writes(run.model)
        return run.model


_LOADED: WeakKeyDictionary[nn.Module, tuple[str, list[int]]] = WeakKeyDictionary()
"""The weights that were last loaded into a model, and the versions of its tensors after that. A model that is
evaluated on several tasks is loaded once, unless something else has written into it since."""


def _count_writes(model: nn.Module) -> list[int]:
    return [tensor._version for each in (model.parameters(), model.buffers()) for tensor in each]


def make_expert_model(run: Run, name: str) -> Model:
    """An expert. It is evaluated on its own task; if there are tasks of the harness, on all tasks."""
    if run.has_harness:
        return Model("checkpoint", tuple(run.tasks), declare_expert(run, name), name=name)
    return Model("expert", (name,), declare_expert(run, name))


@declare
def declare_evaluation(run: Run, model: Model, task: str, part: Part) -> Node:
    """The evaluation of a model on one part of one task: `info["value"]`, and all `info["metrics"]`."""
    return Node(
        "evaluations", f"the evaluation of {model.label} on {task}", "evaluate", task,
        decide=lambda: {
            "model": model.find_key(run),
            "base": model.describe_base(run),
            "task": task,
            "part": part,
        } | _measure_content(run, task),
        make=lambda workspace: _evaluate(run, model, task, part, workspace),
        needs=(model.node,) if model.node else (),
        awaits=model.node.awaits if model.node else (),
    )  # fmt: skip


def _measure_content(run: Run, task: str) -> dict[str, Any]:
    """What decides a score besides the model and the part."""
    measured = run.tasks[task]
    if isinstance(measured, HarnessTask):
        return {"harness": measured.describe_content()} | run.describe_scoring(task)
    return {"data": measured.fingerprint(), "metric": measured.metric} | run.describe_scoring(task)


def _evaluate(run: Run, model: Model, task: str, part: Part, workspace: Workspace) -> Mapping[str, Any]:
    loaded = model.load(run, task)
    reset_peak_memory(run.device)
    scored = run.tasks[task]
    if isinstance(scored, HarnessTask):
        info = _ask_harness(run, model, loaded, scored, workspace)
    else:
        info = _score_part(run, model, loaded, task, part, workspace)
    return info | {"peak_memory_bytes": read_peak_memory(run.device)}


def _ask_harness(
    run: Run, model: Model, loaded: nn.Module, task: HarnessTask, workspace: Workspace
) -> dict[str, Any]:
    backbone = model.backbone or run.backbone
    assert isinstance(backbone, LanguageModel)
    answers = score_with_harness(
        loaded, backbone.load_tokenizer(), task, precision=backbone.precision, progress=run.cfg.progress
    )
    np.savez(
        workspace.out / SAMPLES_OF_METRICS,
        **{n: _to_smallest_type(np.array(v)) for n, v in answers.samples.items()},
    )
    return {
        "value": next(iter(answers.metrics.values())),
        "metric": next(iter(answers.metrics)),
        "metrics": dict(answers.metrics),
        "samples": answers.count,
    }


def _score_part(
    run: Run, model: Model, loaded: nn.Module, task: str, part: Part, workspace: Workspace
) -> dict[str, Any]:
    if model.backbone:
        objective = model.backbone.make_objective(run.tasks[task]).to(run.device)
    else:
        objective = run.make_objective(task)
    if loaded is run.model:
        loaded = run.find_model_to_score(task)
    scores = score(loaded, objective, part, batch_size=run.cfg.evaluation_batch_size)
    each = objective.score_samples(scores.predictions, part, torch.arange(len(scores.predictions)))
    if each is not None:
        np.save(workspace.out / SAMPLES, _to_smallest_type(np.array(each)))
    return {"value": scores.value, "metrics": dict(scores.metrics), "samples": len(scores.predictions)}


def read_metric(run: Run, task: str, artifact: Artifact) -> tuple[str, float]:
    """The metric that the run's tables show for a task, and its value in an evaluation.

    Raises:
        InputError: the harness does not measure this metric on the task.
    """
    metric = run.tasks[task].metric
    if not isinstance(run.tasks[task], HarnessTask):
        return metric, artifact.info["value"]
    metric, metrics = metric or artifact.info["metric"], artifact.info["metrics"]
    if metric not in metrics:
        raise InputError(f"suite.metric: {task} has no metric {metric!r}{suggest(metric, metrics)}")
    return metric, metrics[metric]


def read_samples(run: Run, task: str, artifact: Artifact) -> Any:
    """Each sample's contribution to that value; None if the value is not a mean over samples."""
    if SAMPLES_OF_METRICS in artifact.files:
        return dict(np.load(artifact.find_file(SAMPLES_OF_METRICS))).get(read_metric(run, task, artifact)[0])
    return np.load(artifact.find_file(SAMPLES), allow_pickle=False) if SAMPLES in artifact.files else None


def _to_smallest_type(values: Any) -> Any:
    whole = values.astype(np.uint8)
    return whole if np.array_equal(whole, values) else values.astype(np.float32)
