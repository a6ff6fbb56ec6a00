"""How a merge depends on what went into it: the rank, the number of experts, the curvature."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import torch
from annotated_types import Ge, MinLen

from mergekit_lab.errors import InputError
from mergekit_lab.merging import EpiMer, Method
from mergekit_lab.ranges import Count
from mergekit_lab.reporting.figures import Curve, chart_lines, chart_mergers
from mergekit_lab.runs.analyses.contract import (
    Data,
    Drawing,
    OnSamples,
    choose_merger,
    compute_each,
    describe_experts,
    normalize_mean,
    say_left_out,
)
from mergekit_lab.runs.combine import describe_merge, merge_experts
from mergekit_lab.runs.mergers import Merger
from mergekit_lab.runs.run import Run
from mergekit_lab.store import make_key

_FLAT = 1e6
"""A curvature added to every direction beside which the Fishers' do not count."""


@dataclass(frozen=True, kw_only=True)
class Sweep(OnSamples):
    """What sweeps share: merges that are each evaluated at the best coefficient of a grid.

    Args:
        coefficients: the grid of `α` that the best is taken of.
    """

    coefficients: Annotated[tuple[float, ...], MinLen(1)] = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 2.0)

    def describe(self, run: Run, name: str, tasks: Iterable[str] = (), **settings: Any) -> dict[str, Any]:
        return super().describe(run, name, tasks, coefficients=list(self.coefficients), **settings)

    def _describe_mergers(self, run: Run, mergers: dict[str, Merger], **settings: Any) -> dict[str, Any]:
        name = type(self).__name__
        if not mergers:
            raise InputError(f"no merger of this run can be swept by {name}: set merger=tsvm")
        return self.describe(run, name, mergers=merge_keys(run, mergers), **settings)

    def compute_points(
        self, run: Run, resume: Path, labels: Iterable[str], values: Iterable[Any], measure: Callable[..., Data]
    ) -> Data:
        """Of every merger and swept value a point: what `measure(experts' values, label, value)` gives."""
        own = self.score_experts(run)
        cells = product(labels, values)
        points = compute_each(run, resume, cells, lambda c: {"merger": c[0], **measure(own, *c)}, "merging")
        return {"points": list(points.values())}

    def find_best(
        self, run: Run, method: Method, own: dict[str, float], tasks: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """A merge's best coefficient (1 where the method has none), and its values there, means over tasks.

        The best is that of the normalized value, which leaves out tasks whose experts score 0; of the plain
        value where no other is left.

        Args:
            own: every expert's value on its own task.
            tasks: whose experts are merged, and evaluated on; all by default.
        """
        tasks = list(run.tasks) if tasks is None else list(tasks)
        has_one = type(method).with_coefficient is not Method.with_coefficient
        grid = self.coefficients if has_one else (1.0,)
        unit = merge_experts(run, method.with_coefficient(1.0) if has_one else method, tasks)
        scores = self.score_line(run, run.base_state, unit, grid, tasks)
        values = {t: scores[t]["value"] for t in tasks}
        shares, left_out = normalize_mean(values, own)
        means = [sum(point) / len(point) for point in zip(*values.values(), strict=True)]
        criterion = means if len(left_out) == len(tasks) else shares
        top = max(range(len(grid)), key=criterion.__getitem__)
        return {"coefficient": grid[top], "normalized": shares[top], "value": means[top], "left_out": left_out}


def merge_keys(run: Run, labels: Iterable[str]) -> dict[str, str]:
    """What names the merges of the run's experts by these mergers, whatever their coefficients."""
    return {label: make_key(describe_merge(run, run.mergers[label])) for label in labels}


def list_scaled_mergers(run: Run) -> dict[str, Merger]:
    """The run's mergers that have a coefficient to vary, by label."""
    return {label: m for label, m in run.mergers.items() if m.searched or hasattr(m.method, "coefficient")}


@dataclass(frozen=True, kw_only=True)
class RankSweep(Sweep):
    """Directions an expert keeps of a matrix, for every merger of the run that has a rank (EpiMer, Tables 7–9).

    Args:
        ranks: `k`, each at least 1; more than `int(r/T)` of a matrix's `r` keeps so many.
    """

    ranks: Annotated[tuple[Count, ...], MinLen(1)] = (1, 2, 4, 8, 16, 32)

    def _list_mergers(self, run: Run) -> dict[str, Merger]:
        return {label: m for label, m in run.mergers.items() if hasattr(m.method, "rank")}

    def describe_content(self, run: Run) -> dict[str, Any]:
        return self._describe_mergers(run, self._list_mergers(run), ranks=list(self.ranks))

    def compute(self, run: Run, resume: Path) -> Data:
        def measure(own: dict[str, float], label: str, rank: int) -> Data:
            method: Any = run.mergers[label].method
            return {"rank": rank, **self.find_best(run, replace(method, rank=rank), own)}

        return self.compute_points(run, resume, self._list_mergers(run), self.ranks, measure)

    def draw(self, data: Data) -> Drawing:
        return draw_best("Directions an expert keeps", "rank k", "rank", data["points"], self.part)


@dataclass(frozen=True, kw_only=True)
class ExpertCount(Sweep):
    """Experts merged at a time, for every merger of the run that has a coefficient.

    Of each number some groups are merged and evaluated on their own tasks; the coefficient is the best for the
    group.

    Args:
        groups: of each number, drawn from the run's seed; 0 takes the first tasks in their order alone.
    """

    groups: Annotated[int, Ge(0)] = 3

    def describe_content(self, run: Run) -> dict[str, Any]:
        content = self._describe_mergers(run, list_scaled_mergers(run), groups=self.groups)
        return content | describe_experts(run, run.tasks)

    def _list_groups(self, run: Run) -> list[list[str]]:
        names = list(run.tasks)
        generator = torch.Generator().manual_seed(run.seed)
        groups = []
        for count in range(2, len(names) + 1):
            if count == len(names) or self.groups == 0:
                groups.append(names[:count])
                continue
            seen: set[tuple[int, ...]] = set()
            for _ in range(20 * self.groups):
                seen.add(tuple(sorted(torch.randperm(len(names), generator=generator)[:count].tolist())))
                if len(seen) == self.groups:
                    break
            groups += [[names[i] for i in group] for group in sorted(seen)]
        return groups

    def compute(self, run: Run, resume: Path) -> Data:
        def measure(own: dict[str, float], label: str, group: tuple[str, ...]) -> Data:
            best = self.find_best(run, run.mergers[label].method, own, group)
            return {"tasks": list(group), "experts": len(group), **best}

        groups = [tuple(group) for group in self._list_groups(run)]
        return self.compute_points(run, resume, list_scaled_mergers(run), groups, measure)

    def draw(self, data: Data) -> Drawing:
        return draw_best("Experts merged", "experts", "experts", data["points"], self.part)


def draw_best(
    title: str, x: str, key: str, points: list[dict[str, Any]], part: str, *, logarithmic: bool = False
) -> Drawing:
    """Normalized value and coefficient of every merger over `point[key]`, mean and deviation of points."""
    values: dict[str, dict[int, list[dict[str, float]]]] = {}
    for point in points:
        values.setdefault(point["merger"], {}).setdefault(point[key], []).append(point)
    left_out = say_left_out(task for point in points for task in point.get("left_out", ()))
    panels = []
    for name, y, of, factor in (
        (f"best coefficient, {part}{left_out}", "value (% of the experts')", "normalized", 100.0),
        ("the coefficient", "α", "coefficient", 1.0),
    ):
        curves: dict[str, Curve] = {}
        spreads = {}
        for label, at in values.items():
            means, deviations = zip(
                *(_summarize([factor * p[of] for p in ps]) for ps in at.values()), strict=True
            )
            curves[label] = (list(at), means)
            if any(len(ps) > 1 for ps in at.values()):
                spreads[label] = deviations
        panels.append(chart_mergers(name, x, y, curves, logarithmic_x=logarithmic, spreads=spreads))
    return Drawing(title, panels)


def _summarize(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample deviation of those that are finite; NaN of none, and 0 of fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    return (mean(finite) if finite else math.nan), (stdev(finite) if len(finite) > 1 else 0.0)


@dataclass(frozen=True, kw_only=True)
class CurvatureGain(OnSamples):
    """EpiMer's `η` of every matrix, and what its model loses less than the flat merge of the same directions.

    `η ≥ 0` is the gain of the quadratic objective that curvature weights promise (EpiMer, Theorem 3); whether
    the loss follows is what is measured here. The flat merge is the same method with equal curvatures, TSV-M.

    Args:
        merger: an EpiMer of the run; null: its first.
        coefficient: `α` of both.
    """

    merger: str | None = None
    coefficient: float = 1.0

    def _find_merger(self, run: Run) -> Merger:
        known = {label: m for label, m in run.mergers.items() if isinstance(m.method, EpiMer)}
        return choose_merger(known, self.merger, "no merger of this run is an EpiMer: set merger=epimer")

    def describe_content(self, run: Run) -> dict[str, Any]:
        merger = self._find_merger(run)
        merge = make_key(describe_merge(run, merger))
        return self.describe(run, "curvature_gain", merge=merge, coefficient=self.coefficient)

    def compute(self, run: Run, resume: Path) -> Data:
        method = self._find_merger(run).method
        assert isinstance(method, EpiMer)
        methods = {"curved": method, "flat": replace(method, floor=_FLAT)}

        def compute(name: str) -> Data:
            notes: dict[str, dict[str, Any]] = {}
            unit = merge_experts(run, methods[name].with_coefficient(1.0), notes=notes)
            scores = self.score_line(run, run.base_state, unit, [self.coefficient])
            gains = {matrix: float(note["eta"]) for matrix, note in notes.items() if "eta" in note}
            return {"losses": {task: scores[task]["loss"][0] for task in run.tasks}, "eta": gains}

        merges = compute_each(run, resume, methods, compute, "merging")
        gains = merges["curved"]["eta"]
        losses = {name: merge["losses"] for name, merge in merges.items()}
        return {"matrices": list(gains), "eta": list(gains.values()), "losses": losses}

    def draw(self, data: Data) -> Drawing:
        depth = list(range(1, len(data["eta"]) + 1))
        tasks = list(data["losses"]["flat"])
        positions = list(range(len(tasks)))
        promised = {"η": (depth, data["eta"])}
        curves = {name: (positions, [of[t] for t in tasks]) for name, of in data["losses"].items()}
        title = f"loss at α = {self.coefficient:g}, {self.part}"
        panels = [
            chart_lines("gain promised", "matrix, in the model's order", "η", promised, logarithmic=True),
            chart_lines(title, "", "loss (nats)", curves, labels=tasks, logarithmic=True),
        ]
        return Drawing("Curvature's gain over the flat merge", panels)
