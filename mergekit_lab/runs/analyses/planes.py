"""Losses on planes: that of two task vectors, and that through the cloud of experts which shows most of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, MinLen
from torch import Tensor

from mergekit_lab.analysis.plane import Row, Weights, evaluate_plane
from mergekit_lab.errors import InputError
from mergekit_lab.ranges import Count, require
from mergekit_lab.reporting.encoding import Chart
from mergekit_lab.reporting.figures import chart_plane
from mergekit_lab.runs.analyses.contract import (
    Data,
    Drawing,
    OnSamples,
    choose_pairs,
    compute_each,
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
        alphas = make_grid(self.low, self.high, self.points)
        settings = {"pairs": pairs, "alphas": alphas, "others": self.others}
        return self.describe(run, "plane", names, **settings) | {"tasks": self.tasks}

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
            shown = {f"joint loss, {first} + {second}": np.sum(list(losses.values()), axis=0).tolist()}
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


@dataclass(frozen=True, kw_only=True)
class ExpertCloud(OnSamples):
    """Every task's loss on the plane `θ̄ + x c1 + y c2` of the experts' principal components (EpiMer, Figure 4).

    `θ̄` is the experts' mean, `c1` and `c2` unit vectors; axes are distances in weight space. Components and
    coordinates need only the experts' inner products: on the plane every model is a sum of task vectors.

    Args:
        points: of each axis.
        margin: how far the plane reaches beyond the experts, as a share of the cloud's extent.
    """

    points: Annotated[int, Ge(2)] = 15
    margin: Annotated[float, Ge(0)] = 0.25
    samples: Count | None = 1000

    def describe_content(self, run: Run) -> dict[str, Any]:
        if len(run.tasks) < 3:
            raise InputError("analysis=cloud needs at least three experts")
        return self.describe(run, "cloud", run.tasks, points=self.points, margin=self.margin)

    def compute(self, run: Run, resume: Path) -> Data:
        ends = read_states(run, run.tasks)
        shares, coordinates, explained = find_principal_plane(ends, run.base_state)
        low, high = _find_frame(coordinates, self.margin)
        xs, ys = (make_grid(a, b, self.points) for a, b in zip(low, high, strict=True))
        weights = Weights(run.model, run.base_state, ends)
        chosen = self.take_samples(run)

        def compute(i: int) -> dict[str, list[float]]:
            row: dict[str, list[float]] = {task: [] for task in chosen}
            for y in ys:
                mixed = 1 / len(ends) + xs[i] * shares[0] + y * shares[1]
                weights.move(dict(zip(ends, mixed.tolist(), strict=True)))
                for task, part in chosen.items():
                    row[task].append(part.score(run.model, run.cfg.evaluation_batch_size).loss)
            return row

        rows = compute_each(run, resume, range(self.points), compute, "plane of the cloud").values()
        return {
            "axes": [xs, ys],
            "loss": {task: [row[task] for row in rows] for task in chosen},
            "experts": dict(zip(ends, coordinates.tolist(), strict=True)),
            "explained": explained,
        }

    def draw(self, data: Data) -> Drawing:
        points = {task: tuple(point) for task, point in data["experts"].items()}
        first, second = (f"{100 * share:.0f} %" for share in data["explained"])
        names = (f"component 1 ({first})", f"component 2 ({second})")
        shown = [
            ("all tasks", np.sum(list(data["loss"].values()), axis=0).tolist(), points),
            *((task, values, {task: points[task]}) for task, values in data["loss"].items()),
        ]
        panels = [
            chart_plane(title, values, data["axes"], names, points=marked) for title, values, marked in shown
        ]
        return Drawing(f"Loss around the cloud of experts on {self.part}", panels)


def find_principal_plane(
    ends: Mapping[str, Mapping[str, Tensor]], base: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, list[float]]:
    """Two components as sums of task vectors, where the experts lie on them, and their shares of the variance.

    Returns:
        `[2, T]`: a unit step along a component adds so much of every task vector; `[T, 2]`: the experts'
        coordinates from their mean; two numbers in [0, 1].

    Raises:
        InputError: there is no such plane.
    """
    names = list(ends)
    gram = torch.zeros(len(names), len(names), dtype=torch.float64)
    for name, start in base.items():
        if start.is_floating_point():
            rows = torch.stack([(ends[t][name].double() - start.double()).flatten() for t in names])
            gram += rows @ rows.T
    center = torch.eye(len(names), dtype=torch.float64) - 1 / len(names)
    values, vectors = torch.linalg.eigh(center @ gram @ center)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    if not values[1] > 1e-12 * values[0]:
        raise InputError("the experts lie on a line: there is no plane through them")
    lengths = values[:2].sqrt()
    shares = center @ vectors[:, :2] / lengths
    return shares.T, vectors[:, :2] * lengths, (values[:2] / values.sum()).tolist()


def _find_frame(coordinates: Tensor, margin: float) -> tuple[list[float], list[float]]:
    low, high = coordinates.amin(dim=0), coordinates.amax(dim=0)
    room = margin * (high - low).clamp(min=1e-12)
    return (low - room).tolist(), (high + room).tolist()
