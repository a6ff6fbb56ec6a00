"""The plane through the cloud of experts that shows most of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mergekit_lab.analysis.plane import Weights
from mergekit_lab.errors import InputError
from mergekit_lab.reporting.figures import chart_plane
from mergekit_lab.runs.analyses.contract import (
    Count,
    Data,
    Drawing,
    OnSamples,
    add_planes,
    compute_each,
    describe_experts,
    make_grid,
    read_states,
)
from mergekit_lab.runs.run import Run


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
        return {
            "analysis": "cloud",
            "points": self.points,
            "margin": self.margin,
            **self.describe_part(run),
            **describe_experts(run, run.tasks),
        }

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
            ("all tasks", add_planes(data["loss"].values()), points),
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
