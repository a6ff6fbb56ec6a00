"""What an analysis is, and what all of them read.

An analysis is a frozen dataclass: its fields are its settings. `describe_content` names its result in the
store, `compute` makes it, `draw` makes figures of it, which can be drawn again from the stored numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.analysis.plane import Sample, evaluate_line
from mergekit_lab.errors import InputError, join_names, suggest
from mergekit_lab.kept_results import Cell, keep_results
from mergekit_lab.ranges import Count, check_settings, require_choice
from mergekit_lab.reporting.encoding import Chart
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.mergers import Merger
from mergekit_lab.runs.nodes import Node
from mergekit_lab.runs.run import Run, load_state
from mergekit_lab.tasks import Part

Data = dict[str, Any]


@dataclass(frozen=True)
class Drawing:
    """One figure."""

    title: str
    panels: list[Chart]


class Analysis:
    """Base of all analyses. The types of the fields say which values they may have."""

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self), "analysis.{}")

    def describe(self, run: Run, name: str, tasks: Iterable[str] = (), **settings: Any) -> dict[str, Any]:
        """Contents have the analysis's name, its settings, and what names the experts of these tasks."""
        names = list(tasks)
        return {"analysis": name, **settings} | (describe_experts(run, names) if names else {})

    def list_needs(self, run: Run) -> tuple[Node, ...]:
        """The artifacts that it reads."""
        return tuple(declare_expert(run, task) for task in run.experts)

    def describe_content(self, run: Run) -> dict[str, Any]:
        """Everything that decides the numbers, and nothing else."""
        raise NotImplementedError

    def compute(self, run: Run, resume: Path) -> Data:
        """The numbers, as JSON has them; NaN and infinities become null where they are stored.

        Args:
            resume: a folder that stays when the process is cut, and comes back at the next try.
        """
        raise NotImplementedError

    def draw(self, data: Data) -> Drawing:
        """The figure of these numbers; NaN where null is stored."""
        raise NotImplementedError


def describe_experts(run: Run, tasks: Iterable[str]) -> dict[str, Any]:
    """What names these experts and their base."""
    return {"base": run.base_content, "experts": {task: declare_expert(run, task).key for task in tasks}}


def read_states(run: Run, tasks: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """The experts' weights, on the CPU."""
    return {task: load_state(run.need(declare_expert(run, task))) for task in tasks}


def subtract(end: Tensor, start: Tensor) -> Tensor:
    """A task vector's tensor in float32, whatever the two are stored in."""
    return end.float() - start.float()


def sample(run: Run, task: str, part: Part, samples: int | None) -> Sample:
    """The first `samples` samples of a part of a task, of the run's shuffle."""
    objective = run.make_objective(task)
    order = torch.randperm(objective.task.count(part), generator=torch.Generator().manual_seed(run.seed))
    return Sample(objective, part, order[:samples])


def describe_scores(run: Run, tasks: Iterable[str]) -> dict[str, Any]:
    """What names the data of these tasks, and how they are scored."""
    names = list(tasks)
    how = {task: {"metric": run.tasks[task].metric, **run.describe_scoring(task)} for task in names}
    return {"data": run.describe_data(names), "scores": how}


@dataclass(frozen=True, kw_only=True)
class OnSamples(Analysis):
    """Base of analyses that evaluate models on samples of tasks.

    Args:
        part: train, validation or test; no coefficient may be chosen on test.
        samples: of each task, at most; None takes all.
    """

    part: Part = "validation"
    samples: Count | None = None

    def describe(self, run: Run, name: str, tasks: Iterable[str] = (), **settings: Any) -> dict[str, Any]:
        """The same, and what names the samples of these tasks, by default of all."""
        names = list(tasks)
        scores = describe_scores(run, names or run.tasks)
        part = {"part": self.part, "samples": self.samples, "seed": run.seed}
        return super().describe(run, name, names, **settings) | scores | part

    def take_samples(self, run: Run, tasks: Iterable[str] | None = None) -> dict[str, Sample]:
        """Those samples, by task."""
        names = run.tasks if tasks is None else tasks
        return {task: sample(run, task, self.part, self.samples) for task in names}

    def score_line(
        self, run: Run, start: Mapping[str, Tensor], end: Mapping[str, Tensor], alphas: Sequence[float],
        tasks: Iterable[str] | None = None,
    ) -> dict[str, dict[str, list[float]]]:  # fmt: skip
        """Loss and value of tasks along `start + α (end − start)`; see `evaluate_line`."""
        chosen = self.take_samples(run, tasks)
        return evaluate_line(run.model, start, end, alphas, chosen, run.cfg.evaluation_batch_size)

    def score_experts(self, run: Run) -> dict[str, float]:
        """Every expert's value on its own task."""
        return {
            task: self.score_line(run, run.base_state, end, [1.0], [task])[task]["value"][0]
            for task, end in read_states(run, run.tasks).items()
        }


def check_tasks(run: Run, names: Iterable[str], what: str) -> None:
    """Refuse a name that is no task of the run."""
    for name in names:
        if name not in run.tasks:
            raise InputError(f"{what} names {name!r}, which is not a task{suggest(name, run.tasks)}")


def choose_merger(known: Mapping[str, Merger], label: str | None, lacking: str) -> Merger:
    """The merger that was asked for, by default the first.

    Raises:
        InputError: there is none, as `lacking` says, or not that one.
    """
    if not known:
        raise InputError(lacking)
    label = label or next(iter(known))
    require_choice("analysis.merger", label, known)
    return known[label]


def choose_pairs(run: Run, pairs: list[list[str]] | None, *, default: int | None) -> list[tuple[str, str]]:
    """The pairs that were asked for, by default the first `default` of all; None: all.

    Raises:
        InputError: a task that the run does not have, what is no pair, or a run of one task.
    """
    if len(run.tasks) < 2:
        raise InputError("an analysis of pairs needs two tasks")
    chosen = []
    for pair in list(combinations(run.tasks, 2))[:default] if pairs is None else pairs:
        check_tasks(run, pair, "analysis.pairs")
        if len(pair) != 2 or pair[0] == pair[1]:
            raise InputError(f"analysis.pairs has {list(pair)}; a pair is two different tasks")
        chosen.append((pair[0], pair[1]))
    return chosen


def make_grid(low: float, high: float, points: int) -> list[float]:
    """`points` equidistant values from `low` to `high`.

    Raises:
        InputError: fewer than two, or a range that is empty or not finite.
    """
    if points < 2 or not (low < high and math.isfinite(high - low)):
        raise InputError(
            f"a grid from {low} to {high} with {points} points: it needs low < high, and two points or more"
        )
    return [low + (high - low) * i / (points - 1) for i in range(points)]


def normalize_mean(
    values: Mapping[str, Sequence[float]], own: Mapping[str, float]
) -> tuple[list[float], list[str]]:
    """The mean over tasks of `value / expert's value` at each of A points, and the tasks it leaves out.

    As in a record, a task whose expert does not score above 0 has no such value.

    Args:
        values: `[A]` by task.
        own: every expert's value on its own task.

    Returns:
        `[A]`, NaN where no task is left.
    """
    out = [task for task in values if not own[task] > 0]
    shares = [[value / own[task] for value in row] for task, row in values.items() if task not in out]
    if not shares:
        return [math.nan] * len(next(iter(values.values()))), out
    return [sum(point) / len(point) for point in zip(*shares, strict=True)], out


def say_left_out(left_out: Iterable[str]) -> str:
    """What a title adds for tasks that `normalized` leaves out."""
    names = sorted(set(left_out))
    return f", without {join_names(names)} (experts at 0)" if names else ""


def compute_each(
    run: Run,
    resume: Path,
    cells: Iterable[Cell],
    compute: Callable[[Cell], Any],
    title: str,
    name: str = "cells",
) -> dict[Cell, Any]:
    """What `compute` gives for each of these cells; those of an earlier try are read back.

    Args:
        resume: a folder that stays when the process is cut.
        cells: strings, numbers, or tuples of them.
        compute: gives what JSON can hold, but for NaN and infinities.
        title: of the progress bar.
        name: of the file of results.
    """
    recall = keep_results(compute, resume / f"{name}.jsonl")
    return {cell: recall(cell) for cell in run.track(list(cells), title)}
