"""Learn AdaMerging's coefficients in a run, once, from the tasks' inputs without their labels.

Artifacts declared here: `coefficients`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from mergekit_lab.backbones import ImageObjective
from mergekit_lab.batches import Batch, to_device
from mergekit_lab.errors import InputError
from mergekit_lab.merging import AdaMerging, Learning, learn_coefficients
from mergekit_lab.runs.combine import describe_merge, list_merge_inputs
from mergekit_lab.runs.curvature import find_prefix
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.mergers import Merger
from mergekit_lab.runs.nodes import Node, declare
from mergekit_lab.runs.run import MODEL, Run
from mergekit_lab.store import Artifact, Workspace

COEFFICIENTS = "coefficients.json"


def is_learned(merger: Merger) -> bool:
    """Whether a merger's coefficients are to be learned."""
    return isinstance(merger.method, AdaMerging) and merger.method.learn is not None


def reads_test_inputs(merger: Merger) -> bool:
    """Whether a merged model was made with inputs of test parts."""
    method = merger.method
    return isinstance(method, AdaMerging) and method.learn is not None and method.learn.part == "test"


@declare
def declare_coefficients(run: Run, label: str) -> Node:
    """The learned coefficients, in `coefficients.json`; the entropy before each step in `info["entropies"]`."""
    merger = run.mergers[label]
    return Node(
        "coefficients", f"the coefficients of {label}", "merge", label,
        decide=lambda: describe_merge(run, merger)
        | {"data": run.describe_data(list(run.tasks)), "seed": run.seed},
        make=lambda workspace: _learn(run, merger, workspace),
        needs=list_merge_inputs(run, merger),
        say=lambda learned: _say(merger, learned),
        list_points=lambda learned: [{"entropy": entropy} for entropy in learned.info["entropies"]],
    )  # fmt: skip


def _learn(run: Run, merger: Merger, workspace: Workspace) -> Mapping[str, Any]:
    """Learn the coefficients.

    Raises:
        InputError: a task that is not classified by a frozen head.
    """
    strangers = [task for task in run.tasks if not isinstance(run.make_objective(task), ImageObjective)]
    if strangers:
        raise InputError(f"AdaMerging needs image classes, and {strangers[0]} has none: choose another merger")
    assert isinstance(merger.method, AdaMerging)
    assert merger.method.learn is not None
    how = merger.method.learn
    experts = {task: run.need(declare_expert(run, task)).find_file(MODEL) for task in run.tasks}
    wholes = {task: run.make_objective(task).with_head(run.model) for task in run.tasks}
    inside = {task: find_prefix(whole, run.model) for task, whole in wholes.items()}

    def compute_logits(state: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Sequence[Tensor]:
        return [
            functional_call(wholes[task], {inside[task] + n: t for n, t in state.items()}, inputs[0])
            for task, inputs in batch.items()
        ]

    steps = run.track(_draw_batches(run, how), merger.label, how.steps)
    method, entropies = learn_coefficients(
        run.base_state,
        experts,
        compute_logits,
        steps,
        layer_wise=how.layer_wise,
        lr=how.lr,
        start=how.start,
        device=run.device,
    )
    (workspace.out / COEFFICIENTS).write_text(json.dumps(method.weights, indent=1))
    return {"entropies": entropies}


def _say(merger: Merger, learned: Artifact) -> str:
    """The entropy of the first and the last tenth of the steps."""
    entropies = learned.info["entropies"]
    few = max(1, len(entropies) // 10)
    first, last = (sum(part) / few for part in (entropies[:few], entropies[-few:]))
    return f"{merger.label}: entropy {first:.3f} at first, {last:.3f} after {len(entropies)} steps"


def _draw_batches(run: Run, how: Learning) -> Iterator[dict[str, Batch]]:
    """Inputs of every task for each step, from seeded shuffles of the part, one after another."""
    part: Any = how.part
    orders = {task: _order(run.tasks[task].count(part), how, run.seed) for task in run.tasks}
    for step in range(how.steps):
        chosen = slice(step * how.batch_size, (step + 1) * how.batch_size)
        yield {
            task: to_device(run.make_objective(task).make_batch(part, order[chosen]), run.device)
            for task, order in orders.items()
        }


def _order(size: int, how: Learning, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    turns = -(-how.steps * how.batch_size // size)
    return torch.cat([torch.randperm(size, generator=generator) for _ in range(turns)])
