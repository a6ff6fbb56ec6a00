"""The figures of the page, to look into: Vega-Lite, which the page's script draws and any of its editors opens.

Every function gives one panel, whose width is the page's to choose. What a panel shows is what the figure of
the same name in `plots` and `figures` shows; shares are in percent here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mergekit_lab.reporting.names import DASHES, MARKERS, REFERENCE, Look, choose_looks
from mergekit_lab.reporting.records import write_text
from mergekit_lab.reporting.tables import Row, Table

Chart = dict[str, Any]
"""A Vega-Lite specification of one panel, without its width."""

SUFFIX = ".vl.json"
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_CONFIG: Chart = {
    "background": "white",
    "font": "system-ui, sans-serif",
    "axis": {
        "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 140,
        "labelColor": "#222222", "titleColor": "#222222", "gridColor": "#DDDDDD", "domainColor": "#888888",
        "tickColor": "#888888", "labelOverlap": "greedy",
    },
    "legend": {
        "orient": "bottom", "columns": 2, "labelFontSize": 12, "labelLimit": 150, "symbolLimit": 60,
        "title": None, "labelColor": "#222222",
        "layout": {"bottom": {"direction": "vertical", "anchor": "start"}},
    },
    "title": {"anchor": "start", "fontSize": 13, "color": "#222222"},
    "text": {"fontSize": 11, "color": "#222222"},
    "view": {"stroke": None},
}  # fmt: skip
_SHAPES = dict(
    zip(
        MARKERS,
        ("circle", "square", "diamond", "triangle-down", "triangle-up", "cross", "triangle-left"),
        strict=True,
    )
)
_SHAPES[REFERENCE.marker] = (
    "M0,-1L.23,-.31L.95,-.31L.36,.12L.59,.81L0,.38L-.59,.81L-.36,.12L-.95,-.31L-.23,-.31Z"
)
_STROKES = dict(zip(DASHES, ([1, 0], [6, 3], [2, 2], [6, 2, 2, 2], [8, 2, 2, 2, 2, 2], [1, 3]), strict=True))
_REFERENCES = {"zero_shot": ":", "expert": "-", "joint": "--"}
_POINTS = 30
"""Points of a curve that are still drawn each."""
_CELL = 38
"""Pixels that a number of a heat map needs."""


def save_charts(picture: Path, title: str, charts: Sequence[Chart]) -> None:
    """Write the panels beside the picture that shows the same: `NAME.vl.json` for `NAME.png`."""
    whole = {"$schema": _SCHEMA, "title": title, "config": _CONFIG, "columns": 2, "concat": list(charts)}
    write_text(picture.with_suffix(SUFFIX), json.dumps(whole, ensure_ascii=False) + "\n")


def load_charts(picture: Path) -> Chart | None:
    """Load what `save_charts` wrote next to a picture; None if there is nothing to draw."""
    try:
        chart = json.loads(picture.with_suffix(SUFFIX).read_text(encoding="utf-8"))
        drawable = all(isinstance(panel, dict) for panel in chart["concat"])
        return chart if drawable and isinstance(chart["config"], dict) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def chart_bars(table: Table, group: tuple[str, ...], title: str) -> Chart:
    """Average and normalized value of every merger of a group with intervals, and the references' averages."""
    rows = [row for row in table.rows if row.group == group and row.kind == "merged"]
    values: list[Chart] = []
    for row in rows:
        for measure, cell in (("average", row.average), ("normalized", row.normalized)):
            if cell.mean is None:
                continue
            low, high = row.error_bar(measure) or (cell.mean, cell.mean)
            values.append(
                {
                    "model": row.name, "measure": measure, "value": _percent(cell.mean), "text": cell.text,
                    "low": _percent(low), "high": _percent(high),
                }
            )  # fmt: skip
    references: list[Chart] = [
        {"reference": row.name, "value": _percent(row.average.mean), "dash": _REFERENCES[row.kind]}
        for row in table.rows
        if row.group == group and row.kind in _REFERENCES and row.average.mean is not None
    ]
    y = {"field": "model", "type": "nominal", "sort": None, "title": None}
    offset = {"field": "measure", "type": "nominal", "sort": ["average", "normalized"]}
    top = max([100.0, *(value["high"] for value in values)])
    x = _axis("value", "%", scale={"domain": [0, 1.1 * top], "nice": False})
    tooltip = _tooltip(model="model", measure="measure", text="percent")
    looks = choose_looks(table.mergers)
    colors = {row.name: looks[row.label].color for row in rows}
    bars: list[Chart] = [
        {
            "mark": {"type": "bar"},
            "encoding": {
                "x": x, "y": y, "yOffset": offset, "tooltip": tooltip,
                "color": {
                    "field": "model", "type": "nominal", "legend": None,
                    "scale": {"domain": list(colors), "range": list(colors.values())},
                },
                "opacity": {
                    "field": "measure", "type": "ordinal",
                    "scale": {"domain": ["average", "normalized"], "range": [1, 0.45]},
                    "legend": {"title": None, "columns": 1, "labelExpr": _BARS},
                },
            },
        },
        {
            "mark": {"type": "rule", "color": "black"},
            "transform": [{"filter": "datum.high > datum.low"}],
            "encoding": {
                "x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}, "y": y,
                "yOffset": offset, "tooltip": _tooltip(model="model", measure="measure", low="from", high="to"),
            },
        },
    ]  # fmt: skip
    lines = {
        "data": {"values": references},
        "mark": {"type": "rule", "color": REFERENCE.color, "strokeWidth": 1.3},
        "encoding": {
            "x": {"field": "value", "type": "quantitative"},
            "strokeDash": {
                "field": "reference", "type": "nominal",
                "scale": {
                    "domain": [each["reference"] for each in references],
                    "range": [_STROKES[each["dash"]] for each in references],
                },
                "legend": {"title": None, "columns": 1, "labelExpr": "datum.label + ', average'"},
            },
            "tooltip": _tooltip(reference="model", value="average"),
        },
    }  # fmt: skip
    encoding = {
        "x": {"field": "high", "type": "quantitative"},
        "y": y,
        "yOffset": offset,
        "text": {"field": "text"},
    }
    numbers: list[Chart] = [
        {"mark": {"type": "text", "align": "left", "dx": 4, **halo}, "encoding": encoding}
        for halo in ({"stroke": "white", "strokeWidth": 4}, {})
    ]
    layers = [*bars, *([lines] if references else []), *numbers]
    return _panel(title, {"data": {"values": values}, "layer": layers, "height": {"step": 19}})


_BARS = "datum.label == 'normalized' ? 'normalized (÷ experts)' : datum.label"


def chart_heat_map(rows: Sequence[Row], tasks: Sequence[str], low: float, high: float, title: str) -> Chart:
    """Every model on every task, as numbers in the colors of `low` to `high`."""
    values = [
        {
            "model": row.name, "task": task, "value": None if cell.mean is None else _percent(cell.mean),
            "text": cell.text, "dark": cell.mean is not None and is_dark(cell.mean, (low, high), False),
            "shown": cell.text.partition(" ")[0],
        }
        for row in rows
        for task, cell in zip(tasks, row.cells[:-2], strict=True)
    ]  # fmt: skip
    scale = {"scheme": "cividis", "domain": [_percent(low), _percent(max(high, low + 1e-6))]}
    return _cells(
        title, values, x="task", y="model", scale=scale, columns=len(tasks), height={"step": 26},
        tooltip=_tooltip(model="model", task="task", text="percent"),
    )  # fmt: skip


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
            "row": a, "column": b, "value": _short(value) if a != b and math.isfinite(value) else None,
            "shown": f"{value:.2f}" if math.isfinite(value) else "–", "exact": f"{value:.4g}",
            "dark": a != b and is_dark(value, limits, signed),
        }
        for a, line in zip(names, values, strict=True)
        for b, value in zip(names, line, strict=True)
    ]  # fmt: skip
    scale = {"scheme": "redblue", "reverse": True} if signed else {"scheme": "cividis"}
    return _cells(
        title, cells, x="column", y="row", scale=scale | {"domain": list(limits)}, columns=len(names),
        height={"step": 26}, tooltip=_tooltip(row="row", column="column", exact=title),
    )  # fmt: skip


def is_dark(value: float, limits: tuple[float, float], signed: bool) -> bool:
    """Whether the color of a value wants white ink."""
    low, high = limits
    return abs(value) > 0.6 * high if signed else value < low + 0.42 * (high - low)


def _cells(
    title: str, values: Sequence[Chart], *, x: str, y: str, scale: Chart, columns: int, height: Any,
    tooltip: Sequence[Chart],
) -> Chart:  # fmt: skip
    order = {axis: list(dict.fromkeys(value[axis] for value in values)) for axis in (x, y)}
    encoding = {
        "x": {"field": x, "type": "nominal", "sort": order[x], "title": None, "axis": {"labelAngle": -35}},
        "y": {"field": y, "type": "nominal", "sort": order[y], "title": None},
    }
    color = {
        "field": "value", "type": "quantitative", "scale": scale, "legend": None,
        "condition": {"test": "datum.value === null", "value": "#EEEEEE"},
    }  # fmt: skip
    ink = {"condition": {"test": "datum.dark", "value": "white"}, "value": "black"}
    return _panel(
        title,
        {
            "data": {"values": list(values)},
            "height": height,
            "usermeta": {"minimum": 130 + _CELL * columns},
            "encoding": encoding,
            "layer": [
                {
                    "mark": {"type": "rect", "stroke": "white", "invalid": "show"},
                    "encoding": {"color": color, "tooltip": tooltip},
                },
                {"mark": {"type": "text"}, "encoding": {"text": {"field": "shown"}, "color": ink}},
            ],
        },
    )


def chart_shares(table: Table, rows: Sequence[Row], experts: Row, title: str) -> Chart:
    """Of every merger the share of each expert's value that it keeps, a line of points a task."""
    values = [
        {"task": task, "name": row.name, "value": _percent(cell.mean / own.mean)}
        for row in rows
        for task, cell, own in zip(table.tasks, row.cells[:-2], experts.cells[:-2], strict=True)
        if cell.mean is not None and own.mean
    ]
    looks = choose_looks(table.mergers)
    points = _points({row.name: looks[row.label] for row in rows})
    y = {"field": "task", "type": "nominal", "sort": None, "title": None, "axis": {"grid": True}}
    return _panel(
        title,
        {
            "height": {"step": 30},
            "layer": [
                {
                    "data": {"values": values},
                    "mark": {"type": "point", "filled": True, "size": 80, "opacity": 0.85},
                    "encoding": {
                        "x": _axis("value", "% of the expert's", scale={"zero": False}), "y": y, **points,
                        "tooltip": _tooltip(name="model", task="task", value="% of the expert's"),
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
    table: Table, placed: Sequence[tuple[float, float, Row]], front: Sequence[tuple[float, float]], x: str
) -> Chart:
    """Normalized value over cost, of `(cost, value, row)`, and the line of what nothing cheaper equals."""
    looks = choose_looks(table.mergers)
    names = {row.name: looks.get(row.label, REFERENCE) for _, _, row in placed}
    values = [
        {
            "name": row.name, "label": " / ".join((*row.group, row.name)), "x": cost, "y": _percent(value),
            "text": row.normalized.text,
        }
        for cost, value, row in placed
    ]  # fmt: skip
    across = _axis("x", x, scale={"type": "log", "nice": False, "padding": 20})
    up = _axis("y", "normalized (%)", scale={"zero": False})
    tooltip = [*_tooltip(label="model", text="normalized (%)"), _number("x", x)]
    return _panel(
        "",
        {
            "height": 300,
            "layer": [
                {
                    "data": {"values": [{"x": a, "y": _percent(b)} for a, b in front]},
                    "mark": {"type": "line", "color": "#888888", "strokeDash": [5, 4], "strokeWidth": 1},
                    "encoding": {"x": across, "y": up},
                },
                {
                    "data": {"values": values},
                    "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                    "encoding": {"x": across, "y": up, **_points(names), "tooltip": tooltip},
                },
            ],
        },
    )  # fmt: skip


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
        labels: names of the x, where they are not numbers: then no line joins the points.
    """
    values: list[Chart] = []
    for name, (xs, ys) in curves.items():
        deviations = (spreads or {}).get(name) or [0.0] * len(ys)
        for a, b, deviation in zip(xs, ys, deviations, strict=True):
            if not math.isfinite(b) or (logarithmic and b <= 0):
                continue
            point = {"name": name, "x": a if labels is None else labels[int(a)], "y": _short(b)}
            if deviation:
                point |= {"low": _short(b - deviation), "high": _short(b + deviation)}
            if chosen and a in chosen.get(name, ()):
                point["chosen"] = True
            values.append(point)
    dense = max((len(xs) for xs, _ in curves.values()), default=0) > _POINTS
    across: Chart = {"field": "x", "type": "nominal", "sort": None, "title": x or None}
    if labels is None:
        scale = {"type": "log", "nice": False} if logarithmic_x else {"zero": False, "nice": False}
        across = _axis("x", x, scale=scale)
    up = _axis("y", y, scale={"type": "log"} if logarithmic else {"zero": False})
    points = _points(looks)
    if dense:
        points.pop("shape")
    layers: list[Chart] = []
    if labels is None:
        stroke = {
            "field": "name", "type": "nominal",
            "scale": {"domain": list(looks), "range": [_STROKES[look.dash] for look in looks.values()]},
        }  # fmt: skip
        encoding = {"x": across, "y": up, "color": points["color"], "strokeDash": stroke}
        layers.append({"mark": {"type": "line", "strokeWidth": 1.8}, "encoding": encoding})
    if any("low" in value for value in values):
        error = {"x": across, "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}
        layers.append(
            {
                "mark": {"type": "rule", "opacity": 0.6},
                "transform": [{"filter": "isValid(datum.low)"}],
                "encoding": error | {"color": points["color"]},
            }
        )
    at = _tooltip(x=x or "at") if labels is not None else [_number("x", x or "x")]
    tooltip = [*_tooltip(name="name"), *at, _number("y", y or "value")]
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
    return _panel(title, {"data": {"values": values}, "height": 260, "layer": layers})


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
        {"a": _short(a), "b": _short(b), "v": _short(value) if math.isfinite(value) else None}
        for a, line in zip(grid[0], values, strict=True)
        for b, value in zip(grid[1], line, strict=True)
    ]
    color = {
        "field": "v", "type": "quantitative", "legend": None,
        "scale": {
            "type": "threshold", "domain": [_short(level) for level in levels[1:-1]],
            "scheme": {"name": "viridis", "count": max(len(levels) - 1, 2)},
        },
        "condition": {"test": "datum.v === null", "value": "#E4E4E4"},
    }  # fmt: skip
    known = [value for line in values for value in line if math.isfinite(value)]
    across, up = (
        {
            "field": f"low_{field}", "type": "quantitative", "title": name or None,
            "axis": {"grid": False, "tickCount": 6},
            "scale": {"domain": [axis[0] - step / 2, axis[-1] + step / 2], "nice": False},
        }
        for field, step, name, axis in zip("ab", steps, names, grid, strict=True)
    )  # fmt: skip
    said = [_number("a", names[0] or "α1"), _number("b", names[1] or "α2"), _number("v", title)]
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
            "encoding": {**cell, "color": color, "tooltip": said},
        }
    ]
    if box is not None:
        corners = {name: {"datum": value} for name, value in zip(("x", "y", "x2", "y2"), (box[0], box[0],
                   box[1], box[1]), strict=True)}  # fmt: skip
        layers.append({"mark": {"type": "rect", "filled": False, "stroke": "#D62728"}, "encoding": corners})
    if points:
        marked = [{"name": name, "x": x, "y": y} for name, (x, y) in points.items()]
        where = {axis: {"field": axis, "type": "quantitative"} for axis in "xy"}
        dot = {"type": "point", "filled": True, "size": 60, "color": "white", "stroke": "black", "opacity": 1}
        text = {"type": "text", "align": "left", "dx": 6, "dy": -6, "color": "white"}
        layers += [
            {"data": {"values": marked}, "mark": dot, "encoding": where | {"tooltip": _tooltip(name="at")}},
            *(
                {
                    "data": {"values": marked},
                    "mark": text | halo,
                    "encoding": where | {"text": {"field": "name"}},
                }
                for halo in ({"stroke": "black", "strokeWidth": 3}, {})
            ),
        ]
    scale = f"{min(known):.4g} to {max(known):.4g}" if known else "no value"
    whole = {"text": title, "subtitle": f"dark to light: {scale}"}
    return _panel(whole, {"data": {"values": cells}, "height": 280, "layer": layers})


def _panel(title: Any, body: Chart) -> Chart:
    text = title["text"] if isinstance(title, dict) else title
    return {**({"title": title} if text else {}), "description": text or "chart", **body}


def _axis(field: str, title: str, scale: Chart) -> Chart:
    return {
        "field": field, "type": "quantitative", "title": title or None, "scale": scale,
        "axis": {"format": ",.5~g", "tickCount": 6},
    }  # fmt: skip


def _number(field: str, title: str) -> Chart:
    return {"field": field, "type": "quantitative", "title": title, "format": ".5~g"}


def _tooltip(**titles: str) -> list[Chart]:
    return [{"field": field, "type": "nominal", "title": title} for field, title in titles.items()]


def _points(looks: Mapping[str, Look]) -> Chart:
    """Color and shape by name, one legend for both."""
    names = list(looks)
    return {
        "color": {
            "field": "name", "type": "nominal",
            "scale": {"domain": names, "range": [look.color for look in looks.values()]},
        },
        "shape": {
            "field": "name", "type": "nominal",
            "scale": {"domain": names, "range": [_SHAPES[look.marker] for look in looks.values()]},
        },
    }  # fmt: skip


def _percent(share: float) -> float:
    return round(100 * share, 3)


def _short(value: float) -> float:
    return float(f"{value:.5g}")
