"""What an analysis is, and what all of them read.

An analysis is a frozen dataclass: its fields are its settings. `content` names its result in the store,
`compute` makes it, `draw` makes figures of it, which can be drawn again from the stored numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.progress import track
from torch import Tensor

from mergekit_lab.analysis.plane import Sample
from mergekit_lab.errors import InputError, listing, suggestion
from mergekit_lab.ranges import require, require_whole
from mergekit_lab.runs.finetune import expert_node
from mergekit_lab.runs.run import Run, load_state
from mergekit_lab.tasks import Part

if TYPE_CHECKING:
    from mergekit_lab.reporting.figures import Panel, Plane

Data = dict[str, Any]
Cell = TypeVar("Cell")


@dataclass(frozen=True)
class Drawing:
    """One figure: panels, and what `draw_analysis` takes besides."""

    title: str
    panels: list[Panel]
    options: Mapping[str, Any]


class Analysis:
    """Base of all analyses."""

    def __post_init__(self) -> None:
        """Check what many have; a subclass that checks more calls this first."""
        samples = getattr(self, "samples", None)
        if samples is not None:
            require_whole("analysis.samples", samples, 1)

    def content(self, run: Run) -> dict[str, Any]:
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


def experts_content(run: Run, tasks: Iterable[str]) -> dict[str, Any]:
    """What names these experts and their base."""
    return {"base": run.base_content, "experts": {task: expert_node(run, task).key for task in tasks}}


def read_states(run: Run, tasks: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """The experts' weights, on the CPU."""
    return {task: load_state(run.need(expert_node(run, task))) for task in tasks}


def subtract(end: Tensor, start: Tensor) -> Tensor:
    """A task vector's tensor in float32, whatever the two are stored in."""
    return end.float() - start.float()


def sample(run: Run, task: str, part: Part, samples: int | None) -> Sample:
    """The first `samples` samples of a part of a task, of the run's shuffle."""
    objective = run.objective(task)
    order = torch.randperm(objective.task.count(part), generator=torch.Generator().manual_seed(run.seed))
    return Sample(objective, part, order[:samples])


def scores_content(run: Run, tasks: Iterable[str]) -> dict[str, Any]:
    """What names the data of these tasks, and how they are scored."""
    names = list(tasks)
    how = {task: {"metric": run.tasks[task].metric, **run.scoring_content(task)} for task in names}
    return {"data": run.data_content(names), "scores": how}


def part_content(
    run: Run, part: Part, samples: int | None, tasks: Iterable[str] | None = None
) -> dict[str, Any]:
    """What names the samples that `sample` gives of these tasks, by default of all."""
    content = scores_content(run, run.tasks if tasks is None else tasks)
    return content | {"part": part, "samples": samples, "seed": run.seed}


def take_samples_of(
    run: Run, part: Part, samples: int | None, tasks: Iterable[str] | None = None
) -> dict[str, Sample]:
    """`sample` of each of these tasks, by default of all."""
    return {task: sample(run, task, part, samples) for task in (run.tasks if tasks is None else tasks)}


def check_tasks(run: Run, names: Iterable[str], what: str) -> None:
    """Refuse a name that is no task of the run."""
    for name in names:
        if name not in run.tasks:
            raise InputError(f"{what} names {name!r}, which is not a task{suggestion(name, run.tasks)}")


def choose_pairs(run: Run, pairs: list[list[str]] | None) -> list[tuple[str, str]]:
    """The pairs that were asked for, by default the first two tasks.

    Raises:
        InputError: no pair, a task that the run does not have, or what is no list of lists of two tasks.
    """
    if pairs is not None:
        shaped = len(pairs) > 0 and all(isinstance(pair, list | tuple) for pair in pairs)
        rule = "a list of pairs, each a list of two tasks: [[a,b],…]; or null"
        require(shaped, "analysis.pairs", pairs, rule)
    given = [tuple(run.tasks)[:2]] if pairs is None else [tuple(pair) for pair in pairs]
    chosen = []
    for pair in given:
        check_tasks(run, pair, "analysis.pairs")
        if len(pair) != 2 or pair[0] == pair[1]:
            raise InputError(f"analysis.pairs has {list(pair)}; a pair is two different tasks")
        chosen.append((pair[0], pair[1]))
    return chosen


def list_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """All pairs of different names, in their order."""
    return list(combinations(names, 2))


def make_grid(low: float, high: float, points: int) -> list[float]:
    """`points` equidistant values from `low` to `high`.

    Raises:
        InputError: fewer than two, or a range that is empty or not finite.
    """
    if not isinstance(points, int) or points < 2 or not (low < high and math.isfinite(high - low)):
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


def without(left_out: Iterable[str]) -> str:
    """What a title adds for tasks that `normalized` leaves out."""
    names = sorted(set(left_out))
    return f", without {listing(names)} (experts at 0)" if names else ""


def make_plane_panel(
    title: str, values: Sequence[Sequence[float]], points: Mapping[str, tuple[float, float]] | None = None
) -> Plane:
    """A panel over two coefficients, whose title counts the cells that are not finite."""
    from mergekit_lab.reporting.figures import Plane

    cells = [value for row in values for value in row]
    lost = sum(not math.isfinite(value) for value in cells)
    if lost:
        title = f"{title} ({lost} of {len(cells)} not finite)"
    return Plane(title, values, points or {})


def without_nan(data: Any) -> Any:
    """As JSON can hold it: None in place of every NaN and infinity."""
    return _replace(
        data, lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    )


def with_nan(data: Any) -> Any:
    """As it is computed with and drawn: NaN in place of every None."""
    return _replace(data, lambda value: math.nan if value is None else value)


def _replace(data: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(data, Mapping):
        return {name: _replace(value, change) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_replace(value, change) for value in data]
    return change(data)


def compute_each(
    run: Run, cells: Iterable[Cell], compute: Callable[[Cell], Any], file: Path, title: str
) -> dict[Cell, Any]:
    """What `compute` gives for each of these cells; those of an earlier try are read from `file`.

    Args:
        cells: strings, numbers, or tuples of them.
        compute: gives what JSON can hold, but for NaN and infinities.
        file: one that stays when the process is cut.
        title: of the progress bar.
    """
    done = {_as_cell(cell): value for cell, value in _read_lines(file)}
    results = {}
    for cell in track(list(cells), title, disable=not run.cfg.progress, transient=True):
        if cell not in done:
            done[cell] = compute(cell)
            with file.open("a") as stream:
                stream.write(_line([cell, done[cell]]))
        results[cell] = done[cell]
    return results


def _as_cell(value: Any) -> Any:
    return tuple(map(_as_cell, value)) if isinstance(value, list) else value


def _read_lines(file: Path) -> list[Any]:
    """The lines of an earlier try; one that was cut is left out, here and in the file."""
    if not file.exists():
        return []
    lines = []
    for line in file.read_text().splitlines():
        try:
            lines.append(with_nan(json.loads(line)))
        except ValueError:
            break
    file.write_text("".join(map(_line, lines)))
    return lines


def _line(item: Any) -> str:
    return json.dumps(without_nan(item), allow_nan=False) + "\n"
