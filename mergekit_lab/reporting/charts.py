"""What figures show, in Vega-Lite: the page's script draws it to look into, `drawing` makes files of it.

Every function gives one panel. Shares are in percent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mergekit_lab.reporting.names import DASHES, REFERENCE, Look, choose_looks
from mergekit_lab.reporting.tables import Row, Table

Chart = dict[str, Any]
"""A Vega-Lite specification of one panel. Where it has no width, who draws it chooses one."""

MISSING_COLOR = "#E4E4E4"
_REFERENCES = {"zero_shot": DASHES[2], "expert": DASHES[0], "joint": DASHES[1]}
_POINTS = 30
"""Points of a curve that are still drawn each."""
_CELL = 38
"""Pixels that a number of a heat map needs."""
_SIDE = 280
"""Of a plane, in pixels."""


def chart_bars(table: Table, group: tuple[str, ...], title: str, error_bars: str) -> Chart:
    """Average and normalized value of every merger of a group, and the references' averages.

    Args:
        error_bars: what they are, see `explain_error_bars`.
    """
    rows = [row for row in table.rows if row.group == group and row.kind == "merged"]
    values: list[Chart] = []
    for row in rows:
        for measure, cell in (("average", row.average), ("normalized", row.normalized)):
            if cell.mean is None:
                continue
            low, high = row.compute_error_bar(measure) or (cell.mean, cell.mean)
            values.append(
                {
                    "model": row.name, "measure": measure, "value": _to_percent(cell.mean), "text": cell.text,
                    "low": _to_percent(low), "high": _to_percent(high), "best": cell.best,
                }
            )  # fmt: skip
    references = [row for row in table.rows if row.group == group and row.kind in _REFERENCES]
    lines = {row.name: row for row in references if row.average.mean is not None}
    shown = [{"reference": name, "value": _to_percent(row.average.mean or 0.0)} for name, row in lines.items()]
    y = _encode_nominal("model")
    offset = {"field": "measure", "type": "nominal", "sort": ["average", "normalized"]}
    # A value's text stands behind its bar
    room = 1.1 if all(cell.sd is None for row in rows for cell in row.cells[-2:]) else 1.2
    top = room * max([100.0, *(value["high"] for value in values)])
    unit = f"% (error bars: {error_bars})" if error_bars else "%"
    x = _encode_axis("value", unit, {"domain": [0, top], "nice": False})
    looks = choose_looks(table.mergers)
    layers: list[Chart] = [
        {
            "mark": {"type": "bar", "height": {"band": 0.9}},
            "encoding": {
                "x": x, "y": y, "yOffset": offset,
                "tooltip": _encode_tooltip(model="model", measure="measure", text="percent"),
                "color": _scale("model", {row.name: looks[row.label].color for row in rows}) | {"legend": None},
                "opacity": {
                    "field": "measure", "type": "ordinal",
                    "scale": {"domain": ["average", "normalized"], "range": [1, 0.45]},
                    "legend": {"labelExpr": _BARS},
                },
            },
        },
        {
            "mark": _ERROR_BAR,
            "transform": [{"filter": "datum.high > datum.low"}],
            "encoding": {
                "x": {"field": "low", "type": "quantitative", "title": unit}, "x2": {"field": "high"}, "y": y,
                "yOffset": offset,
                "tooltip": _encode_tooltip(model="model", measure="measure", low="from", high="to"),
            },
        },
        {
            "data": {"values": shown},
            "mark": {"type": "rule", "color": REFERENCE.color, "strokeWidth": 1.3},
            "encoding": {
                "x": {"field": "value", "type": "quantitative"},
                "strokeDash": _scale("reference", {name: _REFERENCES[r.kind] for name, r in lines.items()})
                | {"legend": {"labelExpr": "datum.label + ', average'"}},
                "tooltip": _encode_tooltip(reference="model", value="average"),
            },
        },
        *_write(
            {
                "x": {"field": "high", "type": "quantitative"}, "y": y, "yOffset": offset,
                "text": {"field": "text"},
            },
            {"align": "left", "dx": 5, "fontWeight": {"expr": "datum.best ? 'bold' : 'normal'"}},
        ),
    ]  # fmt: skip
    if not lines:
        del layers[2]
    return _make_panel(title, {"data": {"values": values}, "layer": layers, "height": {"step": 19}})


_BARS = "datum.label == 'normalized' ? 'normalized (÷ experts)' : datum.label"


def chart_heat_map(rows: Sequence[Row], tasks: Sequence[str], low: float, high: float) -> Chart:
    """Every model on every task, as numbers in the colors of `low` to `high`."""
    values = [
        {
            "model": row.name, "task": task, "value": None if cell.mean is None else _to_percent(cell.mean),
            "text": cell.text, "dark": cell.mean is not None and is_dark(cell.mean, (low, high), False),
            "shown": cell.text.partition(" ")[0],
        }
        for row in rows
        for task, cell in zip(tasks, row.cells[:-2], strict=True)
    ]  # fmt: skip
    scale = {"scheme": "cividis", "domain": [_to_percent(low), _to_percent(max(high, low + 1e-6))]}
    tooltip = _encode_tooltip(model="model", task="task", text="percent")
    return _draw_cells("", values, "task", "model", scale, tooltip)


def chart_matrix(
    title: str,
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    limits: tuple[float, float],
    signed: bool,
) -> Chart:
    """Numbers between names, the diagonal gray."""
    cells = [
        {
            "row": a, "column": b, "value": _shorten(value) if a != b and math.isfinite(value) else None,
            "shown": f"{round(value, 2) + 0.0:.2f}" if math.isfinite(value) else "–", "exact": f"{value:.4g}",
            "dark": a != b and is_dark(value, limits, signed),
        }
        for a, line in zip(names, values, strict=True)
        for b, value in zip(names, line, strict=True)
    ]  # fmt: skip
    scale = {"scheme": "redblue", "reverse": True} if signed else {"scheme": "cividis"}
    tooltip = _encode_tooltip(row="row", column="column", exact=title)
    return _draw_cells(title, cells, "column", "row", scale | {"domain": list(limits)}, tooltip)


def is_dark(value: float, limits: tuple[float, float], signed: bool) -> bool:
    """Whether the color of a value wants white ink."""
    low, high = limits
    return abs(value) > 0.6 * high if signed else value < low + 0.42 * (high - low)


def _draw_cells(
    title: str, values: Sequence[Chart], x: str, y: str, scale: Chart, tooltip: Sequence[Chart]
) -> Chart:
    order = {axis: list(dict.fromkeys(value[axis] for value in values)) for axis in (x, y)}
    color = {
        "field": "value", "type": "quantitative", "scale": scale, "legend": None,
        "condition": {"test": "datum.value === null", "value": MISSING_COLOR},
    }  # fmt: skip
    ink = {"condition": {"test": "datum.dark", "value": "white"}, "value": "black"}
    return _make_panel(
        title,
        {
            "data": {"values": list(values)},
            "height": {"step": 26},
            "usermeta": {"minimum": 130 + _CELL * len(order[x])},
            "encoding": {
                "x": _encode_nominal(x) | {"sort": order[x], "axis": {"labelAngle": -35}},
                "y": _encode_nominal(y) | {"sort": order[y]},
            },
            "layer": [
                {
                    "mark": {"type": "rect", "stroke": "white", "invalid": "show"},
                    "encoding": {"color": color, "tooltip": tooltip},
                },
                {"mark": {"type": "text"}, "encoding": {"text": {"field": "shown"}, "color": ink}},
            ],
        },
    )


def chart_shares(table: Table, rows: Sequence[Row], experts: Row) -> Chart:
    """Of every merger the share of each expert's value that it keeps, a line of points a task."""
    values = [
        {"task": task, "name": row.name, "value": _to_percent(cell.mean / own.mean)}
        for row in rows
        for task, cell, own in zip(table.tasks, row.cells[:-2], experts.cells[:-2], strict=True)
        if cell.mean is not None and own.mean
    ]
    looks = choose_looks(table.mergers)
    names = {row.name: looks[row.label] for row in rows}
    x = _encode_axis("value", "% of the expert's", {"zero": False})
    tooltip = _encode_tooltip(name="model", task="task", value="% of the expert's")
    return _make_panel(
        "",
        {
            "height": {"step": 30},
            "layer": [
                {
                    "data": {"values": values},
                    "mark": {"type": "point", "filled": True, "size": 80, "opacity": 0.85},
                    "encoding": {
                        "x": x, "y": _encode_nominal("task") | {"axis": {"grid": True}}, "tooltip": tooltip,
                        **_look(names),
                    },
                },
                {
                    "data": {"values": [{"value": 100}]},
                    "mark": {"type": "rule", "color": REFERENCE.color},
                    "encoding": {"x": {"field": "value", "type": "quantitative"}},
                },
            ],
        },
    )  # fmt: skip


def chart_costs(
    title: str,
    placed: Sequence[tuple[float, Row]],
    names: Mapping[str, Look],
    front: Sequence[tuple[float, float]],
    x: str,
    limits: Sequence[tuple[float, float]],
) -> Chart:
    """Normalized value over cost, and the line of what nothing cheaper equals.

    Args:
        placed: cost and row.
        names: looks of all rows of the figure.
        front: cost and value of the line's points.
        x: what the costs are.
        limits: lowest and highest cost and value, so that panels have the same axes.
    """
    values: list[Chart] = []
    for cost, row in placed:
        value = row.normalized.mean or 0.0
        low, high = row.compute_error_bar("normalized") or (value, value)
        values.append(
            {
                "name": row.name, "x": cost, "y": _to_percent(value), "text": row.normalized.text,
                "low": _to_percent(low), "high": _to_percent(high),
            }
        )  # fmt: skip
    costs, shares = limits
    across = _encode_axis("x", x, {"type": "log", "domain": costs, "nice": False, "padding": 20}, costs)
    up = _encode_axis(
        "y",
        "normalized (%)",
        {"domain": [*map(_to_percent, shares)], "nice": True, "zero": False, "padding": 12},
    )
    looks = _look(names)
    tooltip = [*_encode_tooltip(name="model", text="normalized (%)"), _encode_number("x", x)]
    return _make_panel(
        title,
        {
            "height": 300,
            "layer": [
                {
                    "data": {"values": [{"x": a, "y": _to_percent(b)} for a, b in front]},
                    "mark": {"type": "line", "color": "#888888", "strokeDash": [5, 4], "strokeWidth": 1},
                    "encoding": {"x": across, "y": up},
                },
                _draw_error_bars(values, across, up, looks["color"]),
                {
                    "data": {"values": values},
                    "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                    "encoding": {"x": across, "y": up, **looks, "tooltip": tooltip},
                },
            ],
        },
    )


def chart_lines(
    title: str,
    x: str,
    y: str,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    looks: Mapping[str, Look],
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
    """
    values: list[Chart] = []
    for name, (xs, ys) in curves.items():
        deviations = (spreads or {}).get(name) or [0.0] * len(ys)
        for a, b, deviation in zip(xs, ys, deviations, strict=True):
            if not math.isfinite(b) or (logarithmic and b <= 0):
                continue
            point = {"name": name, "x": a if labels is None else labels[int(a)], "y": _shorten(b)}
            if deviation:
                point |= {"low": _shorten(b - deviation), "high": _shorten(b + deviation)}
            if chosen and a in chosen.get(name, ()):
                point["chosen"] = True
            values.append(point)
    dense = max((len(xs) for xs, _ in curves.values()), default=0) > _POINTS
    across: Chart = _encode_nominal("x") | {"title": x or None}
    if labels is None:
        scale = {"type": "log"} if logarithmic_x else {"zero": False}
        across = _encode_axis("x", x, scale | {"nice": False}, (value["x"] for value in values))
    scale = {"type": "log"} if logarithmic else {"zero": False}
    up = _encode_axis("y", y, scale, (value["y"] for value in values))
    if max((abs(value["y"]) for value in values), default=1.0) < 1e-3:
        up["axis"]["format"] = ".3~e"
    points = _look(looks)
    stroke = _scale("name", {name: look.dash for name, look in looks.items()})
    layers: list[Chart] = []
    if labels is None:
        encoding = {"x": across, "y": up, "color": points["color"], "strokeDash": stroke}
        layers.append({"mark": {"type": "line", "strokeWidth": 1.8}, "encoding": encoding})
    if any("low" in value for value in values):
        layers.append(_draw_error_bars(values, across, up, points["color"]))
    at = _encode_tooltip(x=x or "at") if labels is not None else [_encode_number("x", x or "x")]
    tooltip = [*_encode_tooltip(name="name"), *at, _encode_number("y", y or "value")]
    layers.append(
        {
            "mark": {"type": "point", "filled": True, "size": 45, "opacity": 0 if dense else 1},
            "encoding": {"x": across, "y": up, **points, "tooltip": tooltip},
        }
    )
    if any("chosen" in value for value in values):
        layers.append(
            {
                "mark": {"type": "point", "size": 220, "strokeWidth": 2},
                "transform": [{"filter": "datum.chosen"}],
                "encoding": {"x": across, "y": up, "color": points["color"]},
            }
        )
    return _make_panel(title, {"data": {"values": values}, "height": 260, "layer": layers})


def chart_plane(
    title: str,
    grid: tuple[Sequence[float], Sequence[float]],
    names: tuple[str, str],
    values: Sequence[Sequence[float]],
    levels: Sequence[float],
    points: Mapping[str, tuple[float, float]],
    box: tuple[float, float] | None,
) -> Chart:
    """A value over two coefficients, `values[i][j]` at `(grid[0][i], grid[1][j])`, a color between levels."""
    steps = [(axis[-1] - axis[0]) / max(len(axis) - 1, 1) or 1.0 for axis in grid]
    cells = [
        {"a": _shorten(a), "b": _shorten(b), "v": _shorten(value) if math.isfinite(value) else None}
        for a, line in zip(grid[0], values, strict=True)
        for b, value in zip(grid[1], line, strict=True)
    ]
    color = {
        "field": "v", "type": "quantitative",
        "scale": {
            "type": "threshold", "domain": [_shorten(level) for level in levels[1:-1]],
            "scheme": {"name": "viridis", "count": max(len(levels) - 1, 2)},
        },
        "legend": {"type": "gradient", "orient": "right", "gradientLength": _SIDE, "format": ".3~g"},
        "condition": {"test": "datum.v === null", "value": MISSING_COLOR},
    }  # fmt: skip
    domains = [[axis[0] - step / 2, axis[-1] + step / 2] for step, axis in zip(steps, grid, strict=True)]
    across, up = (
        {
            "field": f"low_{field}", "type": "quantitative", "title": name or None,
            "axis": {"grid": False, "tickCount": 6},
            "scale": {"domain": domain, "nice": False},
        }
        for field, name, domain in zip("ab", names, domains, strict=True)
    )  # fmt: skip
    tooltip = [
        _encode_number("a", names[0] or "α1"),
        _encode_number("b", names[1] or "α2"),
        _encode_number("v", title),
    ]
    ends = [
        {"calculate": f"datum.{field} {sign} {step / 2}", "as": f"{end}_{field}"}
        for field, step in zip("ab", steps, strict=True)
        for sign, end in (("-", "low"), ("+", "high"))
    ]
    cell = {"x": across, "y": up, "x2": {"field": "high_a"}, "y2": {"field": "high_b"}}
    layers: list[Chart] = [
        {
            "mark": {"type": "rect", "invalid": "show"},
            "transform": ends,
            "encoding": {**cell, "color": color, "tooltip": tooltip},
        }
    ]
    if box is not None:
        corners = {axis: {"datum": box[end]} for axis, end in (("x", 0), ("y", 0), ("x2", 1), ("y2", 1))}
        layers.append({"mark": {"type": "rect", "filled": False, "stroke": "#D62728"}, "encoding": corners})
    if points:
        where = {axis: {"field": axis, "type": "quantitative"} for axis in "xy"}
        dot = {"type": "point", "filled": True, "size": 60, "color": "white", "stroke": "black", "opacity": 1}
        sides = _place_names(points, domains)
        layers.append(
            {
                "data": {"values": [{"name": name, "x": x, "y": y} for name, (x, y) in points.items()]},
                "mark": dot,
                "encoding": where | {"tooltip": _encode_tooltip(name="at")},
            }
        )
        for name, (x, y) in points.items():
            right, above = sides[name]
            beside = {"align": "left" if right else "right", "dx": 7 if right else -7, "dy": -7 if above else 8}
            encoding = where | {"text": {"field": "name"}}
            written = _write(encoding, beside | {"color": "white"}, halo="black")
            layers += [{"data": {"values": [{"name": name, "x": x, "y": y}]}, **each} for each in written]
    return _make_panel(title, {"data": {"values": cells}, "width": _SIDE, "height": _SIDE, "layer": layers})


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


def _make_panel(title: str, body: Chart) -> Chart:
    return {**({"title": title} if title else {}), "description": title or "chart", **body}


def _encode_nominal(field: str) -> Chart:
    return {"field": field, "type": "nominal", "sort": None, "title": None}


def _encode_axis(field: str, title: str, scale: Chart, values: Iterable[float] = ()) -> Chart:
    """A number's axis; `values` are those on it, for logarithmic ones."""
    axis: Chart = {"format": ",.5~g", "tickCount": 6}
    known = [value for value in values if value > 0 and math.isfinite(value)]
    if scale.get("type") == "log" and known and max(known) < 10 * min(known):
        axis["labelExpr"] = "format(datum.value, ',.5~g')"  # within a decade Vega leaves most ticks without
    return {"field": field, "type": "quantitative", "title": title or None, "scale": scale, "axis": axis}


def _encode_number(field: str, title: str) -> Chart:
    return {"field": field, "type": "quantitative", "title": title, "format": ".5~g"}


def _encode_tooltip(**titles: str) -> list[Chart]:
    return [{"field": field, "type": "nominal", "title": title} for field, title in titles.items()]


def _scale(field: str, values: Mapping[str, Any]) -> Chart:
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(values), "range": list(values.values())},
    }


def _look(looks: Mapping[str, Look]) -> Chart:
    """Color and shape by name, one legend for both."""
    return {
        "color": _scale("name", {name: look.color for name, look in looks.items()}),
        "shape": _scale("name", {name: look.marker for name, look in looks.items()}),
    }


_ERROR_BAR = {"type": "errorbar", "color": "black", "ticks": {"size": 6, "color": "black"}}


def _draw_error_bars(values: Sequence[Chart], x: Chart, y: Chart, color: Chart) -> Chart:
    low = {"field": "low", "type": "quantitative", "title": y["title"]}
    return {
        "data": {"values": [value for value in values if value.get("high") != value.get("low")]},
        "mark": {"type": "errorbar", "opacity": 1, "ticks": {"size": 6, "opacity": 1}},
        "encoding": {"x": x, "y": low, "y2": {"field": "high"}, "color": color},
    }


def _write(encoding: Chart, style: Chart, halo: str = "white") -> list[Chart]:
    """Text that can be read over anything."""
    return [
        {"mark": {"type": "text", **style, **around}, "encoding": encoding}
        for around in ({"stroke": halo, "strokeWidth": 3, "strokeJoin": "round"}, {})
    ]


def _to_percent(share: float) -> float:
    return round(100 * share, 3)


def _shorten(value: float) -> float:
    return float(f"{value:.5g}")
