"""Figures of analyses: planes, lines and matrices, from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergekit_lab.reporting import charts, drawing
from mergekit_lab.reporting.names import REFERENCE, Look, choose_looks, display_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Box = tuple[float, float]
MISSING_COLOR = "#E4E4E4"
_REFERENCES = ("zero-shot", "experts", "+joint")
_MARKED = 30
"""Points of a curve that still get a marker each."""


@dataclass(frozen=True)
class Plane:
    """One panel of a figure over two coefficients.

    Attributes:
        title: above it.
        values: `[A][A]`, rows along the first axis; what is not finite is left gray, with a cross.
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
            return dict(zip(self.curves, map(Look.numbered, count()), strict=False))
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
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    planes = [panel for panel in panels if isinstance(panel, Plane)]
    common = spread_levels([v for plane in planes for row in plane.values for v in row]) if one_scale else None
    rows = -(-len(panels) // columns)
    with drawing.open_figure(4.6 * columns + 0.6, 3.9 * rows + 0.6) as figure:
        drawing.add_heading(figure, title)
        every = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in zip(every, panels, strict=False):
            axes.set_title(panel.title)
            if isinstance(panel, Plane):
                grid = (alphas, alphas if others is None else others)
                _draw_plane(axes, panel, grid, axes_names, box, common)
            elif isinstance(panel, Lines):
                _draw_lines(axes, panel)
            else:
                _draw_matrix(axes, panel)
        for axes in every[len(panels) :]:
            axes.set_axis_off()
        png = drawing.save(figure, stem.with_name(f"{stem.name}.png"))
    grid = (alphas, alphas if others is None else others)
    charts.save_charts(png, title, [_chart(panel, grid, axes_names, box, common) for panel in panels])
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


def _draw_plane(
    axes: Axes,
    panel: Plane,
    grid: tuple[Sequence[float], Sequence[float]],
    names: tuple[str, str],
    box: Box | None,
    common: list[float] | None,
) -> None:
    import numpy as np
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    turned = np.array(panel.values, dtype=float).T  # contours have rows along y
    missing = ~np.isfinite(turned)
    shown = np.ma.masked_array(turned, missing)
    levels = common or spread_levels([value for row in panel.values for value in row])
    axes.set_facecolor(MISSING_COLOR)
    if not missing.all():
        filled = axes.contourf(*grid, shown, levels=levels, cmap="viridis", norm=_space_evenly(levels))
        axes.contour(*grid, shown, levels=levels, colors="white", linewidths=0.4, alpha=0.6)
        axes.figure.colorbar(filled, ax=axes, shrink=0.85)
    rows, columns = missing.nonzero()
    (crosses,) = axes.plot(
        np.take(grid[0], columns), np.take(grid[1], rows), "x", color="#777777", markersize=4, clip_on=False
    )
    crosses.set_in_layout(False)
    if box is not None:
        side = box[1] - box[0]
        edge: dict[str, Any] = {"fill": False, "edgecolor": "#D62728", "linewidth": 1.6}
        axes.add_patch(Rectangle((box[0], box[0]), side, side, **edge))
    for x, y in panel.points.values():
        axes.plot([x], [y], marker="o", markersize=5, color="white", markeredgecolor="black")
    axes.set_xlabel(drawing.shorten(names[0]))
    axes.set_ylabel(drawing.shorten(names[1]))
    axes.set_aspect("equal")
    if panel.points:
        outline = withStroke(linewidth=2, foreground="black")
        points = [(x, y, name) for name, (x, y) in panel.points.items()]
        drawing.place_labels(axes, points, color="white", fontsize=8, path_effects=[outline])


def spread_levels(values: Sequence[float]) -> list[float]:
    """Fifteen levels with as many points between each two: a few huge corners leave the rest its contrast.

    Values that are not finite do not count.
    """
    ordered = sorted(filter(math.isfinite, values)) or [0.0]
    levels = sorted({ordered[round(i * (len(ordered) - 1) / 14)] for i in range(15)})
    return levels if len(levels) > 1 else [ordered[0], ordered[0] + 1.0]


def _space_evenly(levels: Sequence[float]) -> Any:
    from matplotlib.colors import BoundaryNorm

    return BoundaryNorm(levels, 256)


def _draw_lines(axes: Axes, panel: Lines) -> None:
    looks = panel.looks
    for name, (x, y) in panel.curves.items():
        look = looks[name].line | {"marker": "o" if len(x) <= _MARKED else ""}
        if panel.labels is not None:
            look["linestyle"] = ""  # names have no order that a line could follow
        axes.plot(x, y, markersize=4, label=drawing.shorten(panel.label(name)), **look)
        if name in panel.spreads:
            axes.errorbar(x, y, yerr=panel.spreads[name], fmt="none", color=looks[name].color, elinewidth=1.0,
                          capsize=2.0)  # fmt: skip
    if panel.logarithmic_x:
        axes.set_xscale("log")
        drawing.label_log_axis(axes.xaxis)
    elif panel.labels is None:
        whole = all(float(each).is_integer() for x, _ in panel.curves.values() for each in x)
        axes.locator_params(axis="x", nbins=6, integer=whole)
    if max((abs(v) for _, y in panel.curves.values() for v in y if math.isfinite(v)), default=1.0) < 1e-4:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")  # its power would stand in the title
    if panel.logarithmic and panel.positive:
        axes.set_yscale("log")
        drawing.label_log_axis(axes.yaxis)
    if panel.labels is not None:
        names = [drawing.shorten(name, 14) for name in panel.labels]
        axes.set_xticks(range(len(names)), names, rotation=60, fontsize=7)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(True)
    axes.legend(fontsize=7 if len(panel.curves) > 4 else 8)


def _draw_matrix(axes: Axes, panel: Matrix) -> None:
    import matplotlib

    colors = matplotlib.colormaps["RdBu_r" if panel.signed else "cividis"].with_extremes(bad=MISSING_COLOR)
    low, high = panel.limits
    shown = [
        [math.nan if i == j else value for j, value in enumerate(row)] for i, row in enumerate(panel.values)
    ]
    image = axes.imshow(shown, cmap=colors, vmin=low, vmax=high)
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    names = [drawing.shorten(name, 14) for name in panel.names]
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    if len(names) > 12:
        return
    for i, row in enumerate(panel.values):
        for j, value in enumerate(row):
            ink = "white" if i != j and charts.is_dark(value, panel.limits, panel.signed) else "black"
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
