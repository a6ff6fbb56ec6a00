"""What a run evaluates, and one evaluation of it.

Artifacts declared here: `evaluations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergekit_lab.checkpoints import LowRank, open_checkpoint
from mergekit_lab.evaluation import score
from mergekit_lab.runs.finetune import expert_node, joint_node
from mergekit_lab.runs.mergers import Merger
from mergekit_lab.runs.nodes import Node
from mergekit_lab.runs.run import Run, load_state
from mergekit_lab.store import content_key
from mergekit_lab.store.store import Workspace
from mergekit_lab.tasks import Part

PARTS = "tasks"
"""The folder, of a method that makes a model for every task, of what these are made of."""
SAMPLES = "samples.npy"
"""What every sample contributed to an evaluation's value, where that is their mean."""


@dataclass(frozen=True)
class Model:
    """A model that is evaluated.

    Attributes:
        kind: "zero_shot", "expert", "joint" or "merged".
        tasks: what it is evaluated on.
        node: the artifact that holds its weights; None for the base.
        merger: the merger that makes it.
    """

    kind: str
    tasks: tuple[str, ...]
    node: Node | None = None
    merger: Merger | None = None

    def key(self, run: Run) -> str:
        """What names it in evaluations."""
        return self.node.key if self.node else content_key({"base": run.base_content})

    def state(self, run: Run, task: str) -> Mapping[str, Tensor]:
        """Its weights for a task, which differ between tasks where its method makes a model for each."""
        if self.node is None:
            return run.base_state
        artifact = run.need(self.node)
        if self.merger is not None and self.merger.method.by_task:
            base = open_checkpoint(run.base_state, "the base")
            return LowRank(artifact.folder / PARTS, base, f"the model of {self.merger.label}", [task])
        return load_state(artifact)


def base_model(run: Run) -> Model:
    """The base with the backbone's own heads."""
    return Model("zero_shot", tuple(run.tasks))


def expert_model(run: Run, task: str) -> Model:
    """A task's expert, which is evaluated on that task alone."""
    return Model("expert", (task,), expert_node(run, task))


def joint_model(run: Run) -> Model:
    """The model that was trained on all tasks at once."""
    return Model("joint", tuple(run.tasks), joint_node(run))


def evaluation_node(run: Run, model: Model, task: str, part: Part) -> Node:
    """A model on one part of one task: `info["value"]`, and all its `info["metrics"]`."""
    label = model.merger.label if model.merger else model.kind
    return Node(
        "evaluations", f"the evaluation of {label} on {task}", "evaluate", task,
        decide=lambda: {
            "model": model.key(run),
            "base": run.base_content,
            "task": task,
            "data": run.tasks[task].fingerprint(),
            "part": part,
            "metric": run.tasks[task].metric,
        } | run.scoring_content(task),
        make=lambda workspace: _evaluate(run, model, task, part, workspace),
        needs=(model.node,) if model.node else (),
        awaits=model.node.awaits if model.node else (),
    )  # fmt: skip


def _evaluate(run: Run, model: Model, task: str, part: Part, workspace: Workspace) -> Mapping[str, Any]:
    run.model.load_state_dict(dict(model.state(run, task)))
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    objective = run.objective(task)
    scores = score(run.model, objective, part, batch_size=run.cfg.evaluation_batch_size)
    each = objective.score_samples(scores.predictions, part, torch.arange(len(scores.predictions)))
    if each is not None:
        np.save(workspace.out / SAMPLES, _to_smallest_type(np.array(each)))
    return {
        "value": scores.value,
        "metrics": dict(scores.metrics),
        "samples": len(scores.predictions),
        "peak_memory_bytes": peak_memory(run.device),
    }


def _to_smallest_type(values: Any) -> Any:
    whole = values.astype(np.uint8)
    return whole if np.array_equal(whole, values) else values.astype(np.float32)


def peak_memory(device: torch.device) -> int | None:
    """Bytes since the last reset on a CUDA device; None on a CPU, where only the process's peak is known."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
