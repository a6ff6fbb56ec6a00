"""AdaMerging in a run: its coefficients are learned from the tasks' inputs, without their labels, once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.func import functional_call

from mergekit_lab.backbones import ImageObjective
from mergekit_lab.batches import Batch, to_device
from mergekit_lab.errors import InputError
from mergekit_lab.merging import AdaMerging, Learning, learn_coefficients
from mergekit_lab.runs.context import Context
from mergekit_lab.runs.curvature import prefix
from mergekit_lab.runs.setup import Merger
from mergekit_lab.store import Artifact
from mergekit_lab.store.store import Workplace

log = logging.getLogger(__name__)
_FILE = "coefficients.json"


def learns(merger: Merger) -> bool:
    """Whether a merger's coefficients are to be learned."""
    return isinstance(merger.method, AdaMerging) and merger.method.learn is not None


def learning_content(run: Context, merger: Merger) -> dict[str, Any]:
    """What names the coefficients."""
    data = {task: run.fingerprint(task) for task in run.tasks}
    return run.merge_content(merger, merger.content) | {"data": data, "seed": run.seed}


def learned_method(run: Context, merger: Merger) -> AdaMerging:
    """The method with the coefficients that were learned."""
    found = run.made_earlier("coefficients", learning_content(run, merger), merger.label, "merge")
    return AdaMerging(weights=json.loads(found.file(_FILE).read_text()))


def learn(run: Context, merger: Merger) -> Artifact:
    """The coefficients, as an artifact: `coefficients.json`, and the course of the entropy in its info.

    Raises:
        InputError: a task that is not classified by a frozen head.
    """
    strangers = [task for task in run.tasks if not isinstance(run.objective(task), ImageObjective)]
    if strangers:
        raise InputError(f"AdaMerging lowers the entropy over classes, which {strangers[0]} has none of")
    assert isinstance(merger.method, AdaMerging)
    assert merger.method.learn is not None
    how = merger.method.learn

    def make(place: Workplace) -> Mapping[str, Any]:
        experts = {task: run.expert(task).file("model.safetensors") for task in run.tasks}
        wholes = {task: run.objective(task).with_head(run.model) for task in run.tasks}
        inside = {task: prefix(whole, run.model) for task, whole in wholes.items()}

        def logits(state: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Sequence[Tensor]:
            return [
                functional_call(wholes[task], {inside[task] + n: t for n, t in state.items()}, inputs[0])
                for task, inputs in batch.items()
            ]

        steps = track(_batches(run, how), merger.label, how.steps, disable=not run.cfg.progress, transient=True)
        found, entropies = learn_coefficients(
            run.base_state,
            experts,
            logits,
            steps,
            layer_wise=how.layer_wise,
            lr=how.lr,
            start=how.start,
            device=run.device,
        )
        (place.out / _FILE).write_text(json.dumps(found.weights, indent=1))
        return {"entropies": entropies}

    artifact = run.obtain("coefficients", learning_content(run, merger), make)
    course = artifact.info["entropies"]
    few = max(1, len(course) // 10)
    first, last = sum(course[:few]) / few, sum(course[-few:]) / few
    log.info("%s: entropy %.3f at first, %.3f after %d steps", merger.label, first, last, len(course))
    return artifact


def _batches(run: Context, how: Learning) -> Iterator[dict[str, Batch]]:
    """Inputs of every task for each step, from seeded shuffles of the part, one after another."""
    part: Any = how.part
    orders = {task: _order(run.tasks[task].count(part), how, run.seed) for task in run.tasks}
    for step in range(how.steps):
        places = slice(step * how.batch_size, (step + 1) * how.batch_size)
        yield {
            task: to_device(run.objective(task).batch(part, order[places]), run.device)
            for task, order in orders.items()
        }


def _order(size: int, how: Learning, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    turns = -(-how.steps * how.batch_size // size)
    return torch.cat([torch.randperm(size, generator=generator) for _ in range(turns)])
