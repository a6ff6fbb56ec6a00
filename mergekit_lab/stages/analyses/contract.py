"""What an analysis is, and what all of them read.

An analysis is a frozen dataclass: its fields are its settings. `content` names its result in the store,
`compute` makes it, `draw` makes figures of it, which can be drawn again from the stored numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mergekit_lab.analysis.plane import Sample
from mergekit_lab.errors import InputError, suggestion
from mergekit_lab.stages.context import Context, load_state
from mergekit_lab.store import content_key
from mergekit_lab.tasks import Part

if TYPE_CHECKING:
    from mergekit_lab.reporting.figures import Panel

Data = dict[str, Any]


@dataclass(frozen=True)
class Drawing:
    """One figure: panels, and what `analysis_figure` takes besides."""

    title: str
    panels: list[Panel]
    options: Mapping[str, Any]


class Analysis:
    """Base of all analyses."""

    def content(self, run: Context) -> dict[str, Any]:
        """Everything that decides the numbers, and nothing else."""
        raise NotImplementedError

    def compute(self, run: Context, resume: Path) -> Data:
        """The numbers, as JSON has them.

        Args:
            resume: a folder that stays when the process is cut, and comes back at the next try.
        """
        raise NotImplementedError

    def draw(self, data: Data) -> Drawing:
        """The figure of these numbers."""
        raise NotImplementedError


def experts_content(run: Context, tasks: Iterable[str]) -> dict[str, Any]:
    """What names these experts and their base."""
    keys = {task: content_key(run.expert_content(task)) for task in tasks}
    return {"base": run.backbone_content, "experts": keys}


def states(run: Context, tasks: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """The experts' weights, on the CPU."""
    return {task: load_state(run.expert(task)) for task in tasks}


def sample(run: Context, task: str, part: Part, samples: int | None) -> Sample:
    """The first `samples` samples of a part of a task, of the run's shuffle."""
    objective = run.objective(task)
    order = torch.randperm(objective.task.count(part), generator=torch.Generator().manual_seed(run.seed))
    return Sample(objective, part, order[:samples])


def data_content(run: Context, tasks: Iterable[str]) -> dict[str, Any]:
    """What names the data of these tasks, and how they are scored."""
    names = list(tasks)
    how = {task: {"metric": run.tasks[task].metric, **run.scoring(task)} for task in names}
    return {"data": {task: run.fingerprint(task) for task in names}, "scores": how}


def check_tasks(run: Context, names: Iterable[str], what: str) -> None:
    """Refuse a name that is no task of the run."""
    for name in names:
        if name not in run.tasks:
            raise InputError(f"{what} names {name!r}, which is no task{suggestion(name, run.tasks)}")


def chosen_pairs(run: Context, pairs: list[list[str]] | None) -> list[tuple[str, str]]:
    """The pairs that were asked for, by default the first two tasks."""
    given = [tuple(run.tasks)[:2]] if pairs is None else [tuple(pair) for pair in pairs]
    found = []
    for pair in given:
        check_tasks(run, pair, "analysis.pairs")
        if len(pair) != 2 or pair[0] == pair[1]:
            raise InputError(f"analysis.pairs has {list(pair)}; a pair is two different tasks")
        found.append((pair[0], pair[1]))
    return found


def every_pair(names: Iterable[str]) -> list[tuple[str, str]]:
    return list(combinations(names, 2))


def grid(low: float, high: float, points: int) -> list[float]:
    """`points` equidistant values from `low` to `high`.

    Raises:
        InputError: fewer than two, or an empty range.
    """
    if points < 2 or not low < high:
        raise InputError(
            f"a grid from {low} to {high} with {points} points: it needs low < high, and two or more"
        )
    return [low + (high - low) * i / (points - 1) for i in range(points)]


def resumed(file: Path) -> list[Any]:
    """What an earlier try left in `file`, one JSON value a line; a line that was cut is left out."""
    if not file.exists():
        return []
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    file.write_text("".join(json.dumps(item) + "\n" for item in found))
    return found


def keep(file: Path, item: Any) -> None:
    """Append a JSON value to what a next try finds."""
    with file.open("a") as stream:
        stream.write(json.dumps(item) + "\n")
