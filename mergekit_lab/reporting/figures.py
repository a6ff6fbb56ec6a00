"""Panels of plain numbers, for any analysis: curves, planes and matrices.

Every function returns one panel in Vega-Lite. `drawing.save_figure` makes files of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mergekit_lab.reporting.encoding import (
    MISSING_COLOR,
    Chart,
    draw_cells,
    draw_error_bars,
    draw_layer,
    encode_axis,
    encode_looks,
    encode_nominal,
    encode_number,
    encode_quantity,
    encode_scale,
    encode_tooltip,
    is_dark,
    make_panel,
    shorten,
    write_over,
)
from mergekit_lab.reporting.names import REFERENCE, Look, choose_looks, display_name

Curve = tuple[Sequence[float], Sequence[float]]
"""x and y of its points."""

_REFERENCES = ("zero-shot", "experts", "+joint")
_POINTS = 30
"""The most points of a curve that are drawn one by one."""
_SIDE = 280
"""The side of a plane, in pixels."""


def chart_mergers(
    title: str, x: str, y: str, curves: Mapping[str, Curve], *, spreads: Mapping[str, Any] | None = None,
    logarithmic_x: bool = False,
) -> Chart:  # fmt: skip
    """Curves of mergers by label, with the names and looks that they have everywhere. Others are references."""
    looks = choose_looks(label for label in curves if label not in _REFERENCES)
    return chart_lines(
        title,
        x,
        y,
        {display_name(label): curve for label, curve in curves.items()},
        {display_name(label): looks.get(label, REFERENCE) for label in curves},
        logarithmic_x=logarithmic_x,
        spreads={display_name(label): spread for label, spread in (spreads or {}).items()},
    )


def chart_lines(
    title: str,
    x: str,
    y: str,
    curves: Mapping[str, Curve],
    looks: Mapping[str, Look] | None = None,
    *,
    labels: Sequence[str] | None = None,
    logarithmic: bool = False,
    logarithmic_x: bool = False,
    chosen: Mapping[str, Sequence[float]] | None = None,
    spreads: Mapping[str, Sequence[float]] | None = None,
) -> Chart:
    """Curves by name; `chosen` rings the points at these x, `spreads` are deviations of y.

    Args:
        looks: by name, in the order of the legend; it may have more names than there are curves.
        labels: names of the x, where they are not numbers: then no line joins the points.
        logarithmic, logarithmic_x: the scale of y, of x; y stays linear where a value is not positive.
    """
    if looks is None:
        looks = {name: Look.choose(number) for number, name in enumerate(curves)}
    logarithmic = logarithmic and all(v > 0 for _, ys in curves.values() for v in ys if math.isfinite(v))
    values: list[Chart] = []
    for name, (xs, ys) in curves.items():
        deviations = (spreads or {}).get(name) or [0.0] * len(ys)
        for a, b, deviation in zip(xs, ys, deviations, strict=True):
            if not math.isfinite(b):
                continue
            point = {"name": name, "x": a if labels is None else labels[int(a)], "y": shorten(b)}
            if deviation:
                point |= {"low": shorten(b - deviation), "high": shorten(b + deviation)}
            if chosen and a in chosen.get(name, ()):
                point["chosen"] = True
            values.append(point)
    dense = max((len(xs) for xs, _ in curves.values()), default=0) > _POINTS
    across: Chart = encode_nominal("x") | {"title": x or None}
    if labels is None:
        scale = {"type": "log"} if logarithmic_x else {"zero": False}
        across = encode_axis("x", x, scale | {"nice": False}, (value["x"] for value in values))
    scale = {"type": "log"} if logarithmic else {"zero": False}
    up = encode_axis("y", y, scale, (value["y"] for value in values))
    if max((abs(value["y"]) for value in values), default=1.0) < 1e-3:
        up["axis"]["format"] = ".3~e"
    points = encode_looks(looks)
    stroke = encode_scale("name", {name: look.dash for name, look in looks.items()})
    layers = []
    if labels is None:
        line = {"type": "line", "strokeWidth": 1.8}
        layers.append(draw_layer(line, x=across, y=up, color=points["color"], strokeDash=stroke))
    if any("low" in value for value in values):
        layers.append(draw_error_bars(values, across, up, points["color"]))
    at = encode_tooltip(x=x or "at") if labels is not None else [encode_number("x", x or "x")]
    tooltip = [*encode_tooltip(name="name"), *at, encode_number("y", y or "value")]
    dot = {"type": "point", "filled": True, "size": 45, "opacity": 0 if dense else 1}
    layers.append(draw_layer(dot, x=across, y=up, **points, tooltip=tooltip))
    if any("chosen" in value for value in values):
        ring = {"type": "point", "size": 220, "strokeWidth": 2}
        picked = [{"filter": "datum.chosen"}]
        layers.append(draw_layer(ring, change=picked, x=across, y=up, color=points["color"]))
    return make_panel(title, layers, data={"values": values}, height=260)


def chart_plane(
    title: str,
    values: Sequence[Sequence[float]],
    grid: tuple[Sequence[float], Sequence[float]],
    names: tuple[str, str],
    *,
    points: Mapping[str, tuple[float, float]] | None = None,
    box: Sequence[float] | None = None,
    levels: Sequence[float] | None = None,
) -> Chart:
    """A value over two coefficients; cells that are not finite are gray, and the title counts them.

    Args:
        values: `values[i][j]` at `(grid[0][i], grid[1][j])`.
        names: of the axes.
        points: marked points by name.
        box: a square that is drawn in red, from its lower to its upper coefficient.
        levels: values between which colors change; by default those of `spread_levels`.
    """
    every = [value for row in values for value in row]
    if lost := sum(not math.isfinite(value) for value in every):
        title = f"{title} ({lost} of {len(every)} not finite)"
    levels = levels or spread_levels(every)
    steps = [(axis[-1] - axis[0]) / max(len(axis) - 1, 1) or 1.0 for axis in grid]
    cells = [
        {"a": shorten(a), "b": shorten(b), "v": shorten(value) if math.isfinite(value) else None}
        for a, line in zip(grid[0], values, strict=True)
        for b, value in zip(grid[1], line, strict=True)
    ]
    color = encode_quantity(
        "v",
        scale={
            "type": "threshold", "domain": [shorten(level) for level in levels[1:-1]],
            "scheme": {"name": "viridis", "count": max(len(levels) - 1, 2)},
        },
        legend={"type": "gradient", "orient": "right", "gradientLength": _SIDE, "format": ".3~g"},
        condition={"test": "datum.v === null", "value": MISSING_COLOR},
    )  # fmt: skip
    domains = [[axis[0] - step / 2, axis[-1] + step / 2] for step, axis in zip(steps, grid, strict=True)]
    across, up = (
        encode_quantity(
            f"low_{field}",
            title=name,
            axis={"grid": False, "tickCount": 6},
            scale={"domain": domain, "nice": False},
        )
        for field, name, domain in zip("ab", names, domains, strict=True)
    )
    tooltip = [encode_number(field, name) for field, name in zip("abv", (*names, title), strict=True)]
    ends = [
        {"calculate": f"datum.{field} {sign} {step / 2}", "as": f"{end}_{field}"}
        for field, step in zip("ab", steps, strict=True)
        for sign, end in (("-", "low"), ("+", "high"))
    ]
    cell = {"x": across, "y": up, "x2": {"field": "high_a"}, "y2": {"field": "high_b"}}
    layers = [draw_layer({"type": "rect", "invalid": "show"}, None, ends, **cell, color=color, tooltip=tooltip)]
    if box is not None:
        corners: Chart = {axis: {"datum": box[end]} for axis, end in (("x", 0), ("y", 0), ("x2", 1), ("y2", 1))}
        layers.append(draw_layer({"type": "rect", "filled": False, "stroke": "#D62728"}, **corners))
    if points:
        where: Chart = {axis: encode_quantity(axis) for axis in "xy"}
        dot = {"type": "point", "filled": True, "size": 60, "color": "white", "stroke": "black", "opacity": 1}
        named = [{"name": name, "x": x, "y": y} for name, (x, y) in points.items()]
        layers.append(draw_layer(dot, named, **where, tooltip=encode_tooltip(name="at")))
        for point, (right, above) in zip(named, _place_names(points, domains).values(), strict=True):
            beside = {"align": "left" if right else "right", "dx": 7 if right else -7, "dy": -7 if above else 8}
            beside["color"] = "white"
            layers += write_over(beside, [point], halo="black", **where, text={"field": "name"})
    return make_panel(title, layers, data={"values": cells}, width=_SIDE, height=_SIDE)


def _place_names(
    points: Mapping[str, tuple[float, float]], domains: Sequence[Sequence[float]]
) -> dict[str, tuple[bool, bool]]:
    """On which side of its point each name stands, right and above, so that few meet."""
    taken: list[tuple[float, float, float]] = []
    sides = {}
    for name, point in points.items():
        x, y = (_SIDE * (value - low) / (high - low) for value, (low, high) in zip(point, domains, strict=True))
        width = 6.2 * len(name)
        choices = {
            (right, above): (x + 7 if right else x - 7 - width, y + (7 if above else -8), width)
            for right in (True, False)
            for above in (True, False)
        }

        def meet(side: tuple[bool, bool], choices: Any = choices) -> int:
            left, height, width = choices[side]
            outside = left < 0 or left + width > _SIDE
            return 2 * outside + sum(
                left < other + length and other < left + width and abs(height - level) < 12
                for other, level, length in taken
            )

        sides[name] = min(choices, key=meet)
        taken.append(choices[sides[name]])
    return sides


def spread_levels(values: Sequence[float]) -> list[float]:
    """Fifteen levels with as many points between each two: a few huge corners leave the rest its contrast.

    Values that are not finite do not count.
    """
    ordered = sorted(filter(math.isfinite, values)) or [0.0]
    levels = sorted({ordered[round(i * (len(ordered) - 1) / 14)] for i in range(15)})
    return levels if len(levels) > 1 else [ordered[0], ordered[0] + 1.0]


def chart_matrix(
    title: str, names: Sequence[str], values: Sequence[Sequence[float]], *, signed: bool = False
) -> Chart:
    """Numbers between names; the diagonal, where a thing is compared with itself, is gray and sets no color.

    Args:
        signed: values may be negative: colors are centered on 0.
    """
    off = [v for i, row in enumerate(values) for j, v in enumerate(row) if i != j and math.isfinite(v)]
    high = max(map(abs, off) if signed else off, default=1.0)
    low = -(high or 1.0) if signed else min(off, default=0.0)
    limits = (low, -low if signed else max(high, low + 1e-6))
    cells = [
        {
            "row": a, "column": b, "value": shorten(value) if a != b and math.isfinite(value) else None,
            "shown": f"{round(value, 2) + 0.0:.2f}" if math.isfinite(value) else "–", "exact": f"{value:.4g}",
            "dark": a != b and is_dark(value, limits, signed),
        }
        for a, line in zip(names, values, strict=True)
        for b, value in zip(names, line, strict=True)
    ]  # fmt: skip
    scale = {"scheme": "redblue", "reverse": True} if signed else {"scheme": "cividis"}
    tooltip = encode_tooltip(row="row", column="column", exact=title)
    return draw_cells(title, cells, "column", "row", scale | {"domain": list(limits)}, tooltip)
