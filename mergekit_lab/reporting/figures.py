"""Figures of analyses: planes, lines and matrices, from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergekit_lab.reporting import drawing
from mergekit_lab.reporting.names import NAMES, Look, choose_looks, display_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Box = tuple[float, float]
MISSING_COLOR = "#E4E4E4"
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
        logarithmic, logarithmic_x: the scale of y, of x.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    labels: Sequence[str] | None = None
    logarithmic: bool = False
    logarithmic_x: bool = False


@dataclass(frozen=True)
class Matrix:
    """One panel of numbers between names.

    Attributes:
        limits: of the colors.
    """

    title: str
    names: Sequence[str]
    values: Sequence[Sequence[float]]
    limits: tuple[float, float]


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
    """Draw panels and save them as `stem.png`, `stem.svg` and `stem.pdf`; the PNG and the SVG are returned.

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
    return [png, png.with_suffix(".svg")]


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
    for name, (x, y) in panel.points.items():
        axes.plot([x], [y], marker="o", markersize=5, color="white", markeredgecolor="black")
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(4, 4), color="white", fontsize=8)
    axes.set_xlabel(drawing.shorten(names[0]))
    axes.set_ylabel(drawing.shorten(names[1]))
    axes.set_aspect("equal")


def spread_levels(values: Sequence[float]) -> list[float]:
    """Fifteen levels with as many points between each two: a few huge corners leave the rest its contrast.

    Values that are not finite do not count.
    """
    ordered = sorted(filter(math.isfinite, values)) or [0.0]
    found = sorted({ordered[round(i * (len(ordered) - 1) / 14)] for i in range(15)})
    return found if len(found) > 1 else [ordered[0], ordered[0] + 1.0]


def _space_evenly(levels: Sequence[float]) -> Any:
    from matplotlib.colors import BoundaryNorm

    return BoundaryNorm(levels, 256)


def _draw_lines(axes: Axes, panel: Lines) -> None:
    mergers = all(name in NAMES for name in panel.curves)
    looks = (
        choose_looks(panel.curves)
        if mergers
        else dict(zip(panel.curves, map(Look.numbered, count()), strict=False))
    )
    for name, (x, y) in panel.curves.items():
        look = looks[name].line | {"marker": "o" if len(x) <= _MARKED else ""}
        if panel.labels is not None:
            look["linestyle"] = ""  # names have no order that a line could follow
        label = display_name(name) if mergers else name
        axes.plot(x, y, markersize=4, label=drawing.shorten(label), **look)
    if panel.logarithmic_x:
        axes.set_xscale("log")
        drawing.label_log_axis(axes.xaxis)
    elif panel.labels is None:
        whole = all(float(each).is_integer() for x, _ in panel.curves.values() for each in x)
        axes.locator_params(axis="x", nbins=6, integer=whole)
    if panel.logarithmic:
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
    image = axes.imshow(panel.values, cmap="RdBu_r", vmin=panel.limits[0], vmax=panel.limits[1])
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    names = [drawing.shorten(name, 14) for name in panel.names]
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    if len(names) > 12:
        return
    middle, half = sum(panel.limits) / 2, (panel.limits[1] - panel.limits[0]) / 2
    for i, row in enumerate(panel.values):
        for j, value in enumerate(row):
            dark = abs(value - middle) > 0.6 * half
            ink = "white" if dark else "black"
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
