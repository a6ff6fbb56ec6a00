"""Panels of a report's own figures: mergers by value, task and cost. `plots.py` chooses what they show.

Every function returns one panel in Vega-Lite. The page's script draws it, and `drawing.py` makes files of it.
Shares are in percent. Panels of any curves, planes and matrices are in `figures.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mergekit_lab.reporting.encoding import (
    Chart,
    as_percent,
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
    write_over,
)
from mergekit_lab.reporting.names import DASHES, REFERENCE, Look, choose_looks
from mergekit_lab.reporting.tables import Row, Table

_REFERENCES = {"zero_shot": DASHES[2], "expert": DASHES[0], "joint": DASHES[1]}
_BARS = "datum.label == 'normalized' ? 'normalized (÷ experts)' : datum.label"
_ERROR_BAR = {"type": "errorbar", "color": "black", "ticks": {"size": 6, "color": "black"}}


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
                    "model": row.name, "measure": measure, "value": as_percent(cell.mean), "text": cell.text,
                    "low": as_percent(low), "high": as_percent(high), "best": cell.best,
                }
            )  # fmt: skip
    references = [row for row in table.rows if row.group == group and row.kind in _REFERENCES]
    lines = {row.name: row for row in references if row.average.mean is not None}
    shown = [{"reference": name, "value": as_percent(row.average.mean or 0.0)} for name, row in lines.items()]
    y = encode_nominal("model")
    offset = {"field": "measure", "type": "nominal", "sort": ["average", "normalized"]}
    # A value's text stands behind its bar
    room = 1.1 if all(cell.sd is None for row in rows for cell in row.cells[-2:]) else 1.2
    top = room * max([100.0, *(value["high"] for value in values)])
    unit = f"% (error bars: {error_bars})" if error_bars else "%"
    x = encode_axis("value", unit, {"domain": [0, top], "nice": False})
    looks = choose_looks(table.mergers)
    colors = {row.name: looks[row.label].color for row in rows}
    dashes = {name: _REFERENCES[row.kind] for name, row in lines.items()}
    layers = [
        draw_layer(
            {"type": "bar", "height": {"band": 0.9}},
            x=x, y=y, yOffset=offset,
            tooltip=encode_tooltip(model="model", measure="measure", text="percent"),
            color=encode_scale("model", colors) | {"legend": None},
            opacity={
                "field": "measure", "type": "ordinal",
                "scale": {"domain": ["average", "normalized"], "range": [1, 0.45]},
                "legend": {"labelExpr": _BARS},
            },
        ),
        draw_layer(
            _ERROR_BAR,
            change=[{"filter": "datum.high > datum.low"}],
            x=encode_quantity("low", title=unit), x2={"field": "high"}, y=y, yOffset=offset,
            tooltip=encode_tooltip(model="model", measure="measure", low="from", high="to"),
        ),
    ]  # fmt: skip
    if lines:
        dash = encode_scale("reference", dashes) | {"legend": {"labelExpr": "datum.label + ', average'"}}
        rule = {"type": "rule", "color": REFERENCE.color, "strokeWidth": 1.3}
        tooltip = encode_tooltip(reference="model", value="average")
        layers.append(draw_layer(rule, shown, x=encode_quantity("value"), strokeDash=dash, tooltip=tooltip))
    style = {"align": "left", "dx": 5, "fontWeight": {"expr": "datum.best ? 'bold' : 'normal'"}}
    layers += write_over(style, x=encode_quantity("high"), y=y, yOffset=offset, text={"field": "text"})
    return make_panel(title, layers, data={"values": values}, height={"step": 19})


def chart_heat_map(rows: Sequence[Row], tasks: Sequence[str], low: float, high: float) -> Chart:
    """Every model on every task, as numbers in the colors of `low` to `high`."""
    values = [
        {
            "model": row.name, "task": task, "value": None if cell.mean is None else as_percent(cell.mean),
            "text": cell.text, "dark": cell.mean is not None and is_dark(cell.mean, (low, high), False),
            "shown": cell.text.partition(" ")[0],
        }
        for row in rows
        for task, cell in zip(tasks, row.cells[:-2], strict=True)
    ]  # fmt: skip
    scale = {"scheme": "cividis", "domain": [as_percent(low), as_percent(max(high, low + 1e-6))]}
    tooltip = encode_tooltip(model="model", task="task", text="percent")
    return draw_cells("", values, "task", "model", scale, tooltip)


def chart_shares(table: Table, rows: Sequence[Row], experts: Row) -> Chart:
    """The share of each expert's value that a merger keeps: a line of points per task, a point per merger."""
    values = [
        {"task": task, "name": row.name, "value": as_percent(cell.mean / own.mean)}
        for row in rows
        for task, cell, own in zip(table.tasks, row.cells[:-2], experts.cells[:-2], strict=True)
        if cell.mean is not None and own.mean
    ]
    looks = choose_looks(table.mergers)
    names = {row.name: looks[row.label] for row in rows}
    x = encode_axis("value", "% of the expert's", {"zero": False})
    tooltip = encode_tooltip(name="model", task="task", value="% of the expert's")
    y = encode_nominal("task") | {"axis": {"grid": True}}
    dot = {"type": "point", "filled": True, "size": 80, "opacity": 0.85}
    layers = [
        draw_layer(dot, values, x=x, y=y, tooltip=tooltip, **encode_looks(names)),
        draw_layer({"type": "rule", "color": REFERENCE.color}, [{"value": 100}], x=encode_quantity("value")),
    ]
    return make_panel("", layers, height={"step": 30})


def chart_costs(
    title: str,
    placed: Sequence[tuple[float, Row]],
    names: Mapping[str, Look],
    front: Sequence[tuple[float, float]],
    x: str,
    limits: Sequence[tuple[float, float]],
) -> Chart:
    """Normalized value over cost, and a line through the models that no cheaper one equals.

    Args:
        placed: cost and row.
        names: looks of all rows of the figure.
        front: cost and value of the line's points.
        x: the axis's title, which names the cost.
        limits: lowest and highest cost and value, so that panels have the same axes.
    """
    values: list[Chart] = []
    for cost, row in placed:
        value = row.normalized.mean or 0.0
        low, high = row.compute_error_bar("normalized") or (value, value)
        values.append(
            {
                "name": row.name, "x": cost, "y": as_percent(value), "text": row.normalized.text,
                "low": as_percent(low), "high": as_percent(high),
            }
        )  # fmt: skip
    costs, shares = limits
    across = encode_axis("x", x, {"type": "log", "domain": costs, "nice": False, "padding": 20}, costs)
    up = encode_axis(
        "y",
        "normalized (%)",
        {"domain": [*map(as_percent, shares)], "nice": True, "zero": False, "padding": 12},
    )
    looks = encode_looks(names)
    tooltip = [*encode_tooltip(name="model", text="normalized (%)"), encode_number("x", x)]
    line = {"type": "line", "color": "#888888", "strokeDash": [5, 4], "strokeWidth": 1}
    dot = {"type": "point", "filled": True, "size": 90, "opacity": 1}
    layers = [
        draw_layer(line, [{"x": a, "y": as_percent(b)} for a, b in front], x=across, y=up),
        draw_error_bars(values, across, up, looks["color"]),
        draw_layer(dot, values, x=across, y=up, **looks, tooltip=tooltip),
    ]
    return make_panel(title, layers, height=300)
