"""The plane of two task vectors: joint loss landscape and disentanglement error, from one pass over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from mergekit_lab.analysis.plane import Row, Weights, evaluate_plane
from mergekit_lab.ranges import require
from mergekit_lab.reporting.encoding import Chart
from mergekit_lab.reporting.figures import chart_plane
from mergekit_lab.runs.analyses.contract import (
    Count,
    Data,
    Drawing,
    OnSamples,
    add_planes,
    choose_pairs,
    compute_each,
    describe_experts,
    make_grid,
    read_states,
)
from mergekit_lab.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class _OnPlane(OnSamples):
    """Losses, values and ξ at `θ0 + α1 τ1 + α2 τ2` for pairs of experts.

    Args:
        pairs: `[[a, b], …]`; null: the run's first two tasks.
        low, high, points: of both axes.
        others: α of every other expert of the run, everywhere on the plane; 0 leaves them out. At 0.3, ξ is
            ξ_all.
        tasks: "pair" evaluates on the pair's tasks, "all" on every task of the run.
        box: where coefficients are searched, `[low, high]`, drawn in red; null draws none.
    """

    pairs: Annotated[list[list[str]], MinLen(1)] | None = None
    low: float = -0.5
    high: float = 1.5
    points: int = 21
    others: float = 0.0
    tasks: Literal["pair", "all"] = "pair"
    samples: Count | None = 2000
    box: list[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.box is not None:
            fit = len(self.box) == 2 and self.box[0] < self.box[1]
            require(fit, "analysis.box", self.box, "[low, high] with numbers low < high, or null")

    def describe_content(self, run: Run) -> dict[str, Any]:
        pairs = choose_pairs(run, self.pairs, default=1)
        used = dict.fromkeys(task for pair in pairs for task in pair)
        everything = self.tasks == "all" or self.others != 0
        names = list(run.tasks) if everything else list(used)
        return {
            "analysis": "plane",
            "pairs": pairs,
            "alphas": make_grid(self.low, self.high, self.points),
            "others": self.others,
            "tasks": self.tasks,
            **self.describe_part(run, names),
            **describe_experts(run, names),
        }

    def compute(self, run: Run, resume: Path) -> Data:
        content = self.describe_content(run)
        ends = read_states(run, content["experts"])
        weights = Weights(run.model, run.base_state, ends)
        chosen = self.take_samples(run, content["data"])
        pairs = []
        for pair in content["pairs"]:
            others = {task: self.others for task in ends if task not in pair and self.others}
            on = {t: chosen[t] for t in (chosen if self.tasks == "all" else pair)}
            compute = partial(
                evaluate_plane, run.model, weights, on, pair, content["alphas"],
                others=others, batch_size=run.cfg.evaluation_batch_size,
            )  # fmt: skip
            rows = self._compute_rows(run, resume, compute, pair)
            measures = {name: [row[name] for row in rows] for name in rows[0]}
            pairs.append({"pair": list(pair), "measures": measures})
        return {"alphas": content["alphas"], "pairs": pairs}

    def _compute_rows(
        self, run: Run, resume: Path, compute: Callable[..., Iterator[Row]], pair: tuple[str, str]
    ) -> list[Row]:
        """All rows of a plane; those that an earlier try left are not computed again."""
        rows: Iterator[Row] | None = None

        def compute_next_row(i: int) -> Row:
            nonlocal rows
            rows = rows or compute(start=i)
            return next(rows)

        title, name = " + ".join(pair), "+".join(pair)
        return list(compute_each(run, resume, range(self.points), compute_next_row, title, name).values())

    def _chart(self, data: Data, title: str, values: Any, points: Any = None) -> Chart:
        names = data["pairs"][0]["pair"] if len(data["pairs"]) == 1 else ["first", "second"]
        first, second = (f"α of {name}" for name in names)
        axes = data["alphas"], data["alphas"]
        return chart_plane(title, values, axes, (first, second), points=points, box=self.box)


@dataclass(frozen=True, kw_only=True)
class Landscape(_OnPlane):
    """The joint loss `Σ_t L_t` over the plane, and each task's own."""

    def draw(self, data: Data) -> Drawing:
        panels = []
        for entry in data["pairs"]:
            losses = {n.removeprefix("loss/"): v for n, v in entry["measures"].items() if n.startswith("loss/")}
            first, second = entry["pair"]
            points = {"θ0": (0.0, 0.0), first: (1.0, 0.0), second: (0.0, 1.0)}
            shown = {f"joint loss, {first} + {second}": add_planes(losses.values())}
            if len(data["pairs"]) == 1:
                shown |= {f"loss of {task}": values for task, values in losses.items()}
            panels += [self._chart(data, title, values, points) for title, values in shown.items()]
        return Drawing("Loss landscape of task vectors", panels)


@dataclass(frozen=True, kw_only=True)
class Disentanglement(_OnPlane):
    """The disentanglement error ξ over the plane, in % of the pair's predictions."""

    def draw(self, data: Data) -> Drawing:
        panels = []
        for entry in data["pairs"]:
            percent = [[50 * value for value in row] for row in entry["measures"]["xi"]]
            panels.append(self._chart(data, " + ".join(entry["pair"]), percent))
        kind = "ξ" if not self.others else f"ξ, other experts at {self.others:g}"
        return Drawing(f"Disentanglement error {kind} (% of predictions)", panels)
