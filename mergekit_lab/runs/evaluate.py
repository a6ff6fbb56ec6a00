"""Stage evaluate: every model of the run on the test split of every task, into the store.

No choice is made on the test split: it is evaluated on here and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from mergekit_lab.evaluation import score
from mergekit_lab.runs.context import Context, load_state
from mergekit_lab.runs.setup import Merger
from mergekit_lab.store import Artifact, content_key
from mergekit_lab.store.store import Workplace
from mergekit_lab.tasks import Part

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subject:
    """A model that is evaluated.

    Attributes:
        kind: "zero_shot", "expert", "joint" or "merged".
        key: its key in the store.
        tasks: what it is evaluated on.
        state: loads its weights.
        merger: the merger that made it.
        made: the artifact that holds it; None for the base.
    """

    kind: str
    key: str
    tasks: tuple[str, ...]
    state: Callable[[], dict[str, Tensor]]
    merger: Merger | None = None
    made: Artifact | None = None

    @staticmethod
    def expert(run: Context, task: str) -> Subject:
        artifact = run.expert(task)
        return Subject("expert", artifact.key, (task,), lambda: load_state(artifact), made=artifact)


def subjects(run: Context) -> Iterator[Subject]:
    """Every model of the run, in the order of the table."""
    from mergekit_lab.runs.merge import merged_content

    tasks = tuple(run.tasks)
    yield Subject("zero_shot", content_key({"base": run.backbone_content}), tasks, lambda: run.base_state)
    for task in tasks:
        yield Subject.expert(run, task)
    for merger in run.mergers.values():
        merged = run.made_earlier(
            "merged", merged_content(run, merger), f"the model of {merger.label}", "merge"
        )
        yield Subject("merged", merged.key, tasks, _loader(merged), merger, merged)
    if run.cfg.joint:
        joint = run.made_earlier("joint", run.joint_content(), "the joint model", "finetune")
        yield Subject("joint", joint.key, tasks, _loader(joint), made=joint)


def _loader(artifact: Artifact) -> Callable[[], dict[str, Tensor]]:
    return lambda: load_state(artifact)


def evaluation_content(run: Context, subject: Subject, task: str, part: Part) -> dict[str, Any]:
    """What names an evaluation in the store: the model, the data and how it is scored."""
    return {
        "model": subject.key,
        "base": run.backbone_content,
        "task": task,
        "data": run.fingerprint(task),
        "split": part,
        "metric": run.tasks[task].metric,
    } | run.scoring(task)


def evaluate(run: Context, subject: Subject, task: str, part: Part) -> Artifact:
    """A model on one part of one task, as an artifact: `info["value"]`, and all its `info["metrics"]`."""

    def make(place: Workplace) -> Mapping[str, Any]:
        run.model.load_state_dict(subject.state())
        if run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.device)
        found = score(run.model, run.objective(task), part, batch_size=run.cfg.evaluation_batch_size)
        each = run.objective(task).score_samples(found.predictions, part, torch.arange(len(found.predictions)))
        if each is not None:
            np.save(place.out / SAMPLES, _smallest(np.array(each)))
        return {
            "value": found.value,
            "metrics": dict(found.metrics),
            "samples": len(found.predictions),
            "peak_memory_bytes": peak_memory(run.device),
        }

    return run.obtain("evaluations", evaluation_content(run, subject, task, part), make)


SAMPLES = "samples.npy"
"""What every sample contributed to an evaluation's value, where that is their mean."""


def _smallest(values: Any) -> Any:
    whole = values.astype(np.uint8)
    return whole if np.array_equal(whole, values) else values.astype(np.float32)


def stage_evaluate(run: Context) -> None:
    """Evaluate what has no evaluation on the test split yet, on the run's devices."""
    cells = [(subject, task) for subject in subjects(run) for task in subject.tasks if run.mine(task)]
    missing = [
        task
        for subject, task in cells
        if not run.store.find("evaluations", evaluation_content(run, subject, task, "test"))
    ]
    run.spread(stage_evaluate, list(dict.fromkeys(missing)))
    for subject, task in track(cells, "evaluating", disable=not run.cfg.progress, transient=True):
        evaluate(run, subject, task, "test")


def peak_memory(device: torch.device) -> int | None:
    """Bytes since the last reset on a CUDA device; None on a CPU, where only the process's peak is known."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
