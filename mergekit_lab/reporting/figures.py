"""Figures of analyses: planes, lines and matrices, from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from mergekit_lab.reporting import charts
from mergekit_lab.reporting.drawing import save_figure
from mergekit_lab.reporting.names import REFERENCE, Look, choose_looks, display_name

Box = tuple[float, float]
_REFERENCES = ("zero-shot", "experts", "+joint")


@dataclass(frozen=True)
class Plane:
    """One panel of a figure over two coefficients.

    Attributes:
        title: above it.
        values: `[A][A]`, rows along the first axis; what is not finite is left gray.
        points: marked points `(α1, α2)` by name.
    """

    title: str
    values: Sequence[Sequence[float]]
    points: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lines:
    """One panel of curves.

    Attributes:
        title, x, y: above it and along its axes.
        curves: by name, `(x, y)`.
        labels: names of the x, where they are not numbers.
        logarithmic, logarithmic_x: the scale of y, of x; y stays linear where a value is not positive.
        mergers: the curves are of mergers, by label; another name is of a reference.
        spreads: by curve, the standard deviation or error of each y.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    labels: Sequence[str] | None = None
    logarithmic: bool = False
    logarithmic_x: bool = False
    mergers: bool = False
    spreads: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def positive(self) -> bool:
        """Whether a logarithmic axis can show all of y."""
        return all(value > 0 for _, y in self.curves.values() for value in y if math.isfinite(value))

    @property
    def looks(self) -> dict[str, Look]:
        """By curve."""
        if not self.mergers:
            return dict(zip(self.curves, map(Look.choose, count()), strict=False))
        looks = choose_looks(name for name in self.curves if name not in _REFERENCES)
        return {name: looks.get(name, REFERENCE) for name in self.curves}

    def label(self, name: str) -> str:
        """What a legend calls a curve."""
        return display_name(name) if self.mergers else name


@dataclass(frozen=True)
class Matrix:
    """One panel of numbers between names.

    Attributes:
        signed: values may be negative: colors are centered on 0.

    Colors follow the values off the diagonal, where a thing is compared with itself; the diagonal is left gray.
    """

    title: str
    names: Sequence[str]
    values: Sequence[Sequence[float]]
    signed: bool = False

    @property
    def limits(self) -> tuple[float, float]:
        """Of the colors."""
        off = [v for i, row in enumerate(self.values) for j, v in enumerate(row) if i != j and math.isfinite(v)]
        if self.signed:
            largest = max(map(abs, off), default=1.0) or 1.0
            return -largest, largest
        low, high = min(off, default=0.0), max(off, default=1.0)
        return low, high if high > low else low + 1e-6


Panel = Plane | Lines | Matrix


def draw_analysis(
    title: str,
    panels: Sequence[Panel],
    stem: Path,
    *,
    alphas: Sequence[float] = (),
    others: Sequence[float] | None = None,
    axes_names: tuple[str, str] = ("", ""),
    box: Box | None = None,
    one_scale: bool = False,
) -> list[Path]:
    """Draw panels and save them as PNG, SVG, PDF and Vega-Lite; the PNG and the SVG are returned.

    At most three stand in a row, and four two by two.

    Args:
        title: of the whole.
        alphas, axes_names: of the axes of `Plane` panels.
        others: of their second axis, where it is another.
        box: a square that is drawn in red on `Plane` panels: where coefficients are searched.
        one_scale: the same colors for the same values in all `Plane` panels.
    """
    planes = [panel for panel in panels if isinstance(panel, Plane)]
    common = spread_levels([v for plane in planes for row in plane.values for v in row]) if one_scale else None
    grid = (alphas, alphas if others is None else others)
    drawn = [_chart(panel, grid, axes_names, box, common) for panel in panels]
    png = save_figure(stem.with_name(f"{stem.name}.png"), title, drawn)
    return [png, png.with_suffix(".svg")]


def _chart(panel: Panel, grid: Any, names: tuple[str, str], box: Box | None, common: Any) -> charts.Chart:
    """The panel as the page draws it."""
    if isinstance(panel, Plane):
        levels = common or spread_levels([value for row in panel.values for value in row])
        return charts.chart_plane(panel.title, grid, names, panel.values, levels, panel.points, box)
    if isinstance(panel, Lines):
        return charts.chart_lines(
            panel.title, panel.x, panel.y, {panel.label(name): curve for name, curve in panel.curves.items()},
            {panel.label(name): look for name, look in panel.looks.items()}, labels=panel.labels,
            logarithmic=panel.logarithmic and panel.positive, logarithmic_x=panel.logarithmic_x,
            spreads={panel.label(name): spread for name, spread in panel.spreads.items()},
        )  # fmt: skip
    return charts.chart_matrix(panel.title, panel.names, panel.values, panel.limits, panel.signed)


def spread_levels(values: Sequence[float]) -> list[float]:
    """Fifteen levels with as many points between each two: a few huge corners leave the rest its contrast.

    Values that are not finite do not count.
    """
    ordered = sorted(filter(math.isfinite, values)) or [0.0]
    levels = sorted({ordered[round(i * (len(ordered) - 1) / 14)] for i in range(15)})
    return levels if len(levels) > 1 else [ordered[0], ordered[0] + 1.0]
