"""The parts of figures' Vega-Lite specifications."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mergekit_lab.reporting.names import Look

Chart = dict[str, Any]
"""A Vega-Lite specification of one panel. Where it has no width, who draws it chooses one."""

MISSING_COLOR = "#E4E4E4"
_CELL = 38
"""Pixels that a number of a heat map needs."""


def make_panel(title: str, layers: Sequence[Chart], **shape: Any) -> Chart:
    """A panel with its title, and what a screen reader says of it."""
    named = {"title": title} if title else {}
    return {**named, "description": title or "chart", **shape, "layer": list(layers)}


def draw_layer(
    mark: Chart, values: Sequence[Chart] | None = None, change: Sequence[Chart] = (), **channels: Any
) -> Chart:
    """Marks of one kind, for their own `values` or the panel's, after the transform `change` if it is given."""
    own = {} if values is None else {"data": {"values": list(values)}}
    changed = {"transform": change} if change else {}
    return {**own, "mark": mark, **changed, "encoding": channels}


def encode_quantity(field: str, **more: Any) -> Chart:
    """A number."""
    return {"field": field, "type": "quantitative", **more}


def encode_nominal(field: str) -> Chart:
    """Names, in the order in which they come."""
    return {"field": field, "type": "nominal", "sort": None, "title": None}


def encode_axis(field: str, title: str, scale: Chart, values: Iterable[float] = ()) -> Chart:
    """A number's axis. A logarithmic one needs the `values` on it."""
    axis: Chart = {"format": ",.5~g", "tickCount": 6}
    known = [value for value in values if value > 0 and math.isfinite(value)]
    if scale.get("type") == "log" and known and max(known) < 10 * min(known):
        axis["labelExpr"] = "format(datum.value, ',.5~g')"  # within a decade Vega leaves most ticks without
    return encode_quantity(field, title=title or None, scale=scale, axis=axis)


def encode_number(field: str, title: str) -> Chart:
    """A number of a tooltip."""
    return encode_quantity(field, title=title, format=".5~g")


def encode_tooltip(**titles: str) -> list[Chart]:
    """Texts of a tooltip, each field with its title."""
    return [{"field": field, "type": "nominal", "title": title} for field, title in titles.items()]


def encode_scale(field: str, values: Mapping[str, Any]) -> Chart:
    """The scale of a field of names: a color, shape or dash for each."""
    scale = {"domain": list(values), "range": list(values.values())}
    return {"field": field, "type": "nominal", "scale": scale}


def encode_looks(looks: Mapping[str, Look]) -> Chart:
    """Color and shape by name, one legend for both."""
    return {
        "color": encode_scale("name", {name: look.color for name, look in looks.items()}),
        "shape": encode_scale("name", {name: look.marker for name, look in looks.items()}),
    }


def draw_error_bars(values: Sequence[Chart], x: Chart, y: Chart, color: Chart) -> Chart:
    """Error bars from `low` to `high` of the values that have both."""
    mark = {"type": "errorbar", "opacity": 1, "ticks": {"size": 6, "opacity": 1}}
    spread = [value for value in values if value.get("high") != value.get("low")]
    low = encode_quantity("low", title=y["title"])
    return draw_layer(mark, spread, x=x, y=low, y2={"field": "high"}, color=color)


def write_over(
    style: Chart, values: Sequence[Chart] | None = None, halo: str = "white", **channels: Any
) -> list[Chart]:
    """Layers of a text that is readable over anything."""
    return [
        draw_layer({"type": "text", **style, **around}, values, **channels)
        for around in ({"stroke": halo, "strokeWidth": 3, "strokeJoin": "round"}, {})
    ]


def as_percent(share: float) -> float:
    """91.3 of 0.913."""
    return round(100 * share, 3)


def shorten(value: float) -> float:
    """Round to as many digits as a figure can show."""
    return float(f"{value:.5g}")


def is_dark(value: float, limits: tuple[float, float], signed: bool) -> bool:
    """Whether text over the color of a value should be white."""
    low, high = limits
    return abs(value) > 0.6 * high if signed else value < low + 0.42 * (high - low)


def draw_cells(
    title: str, values: Sequence[Chart], x: str, y: str, scale: Chart, tooltip: Sequence[Chart]
) -> Chart:
    """A heat map of `value`, with the text `shown` in every cell; white where it is `dark`."""
    order = {axis: list(dict.fromkeys(value[axis] for value in values)) for axis in (x, y)}
    missing = {"test": "datum.value === null", "value": MISSING_COLOR}
    color = encode_quantity("value", scale=scale, legend=None, condition=missing)
    ink = {"condition": {"test": "datum.dark", "value": "white"}, "value": "black"}
    layers = [
        draw_layer({"type": "rect", "stroke": "white", "invalid": "show"}, color=color, tooltip=tooltip),
        draw_layer({"type": "text"}, text={"field": "shown"}, color=ink),
    ]
    return make_panel(
        title,
        layers,
        data={"values": list(values)},
        height={"step": 26},
        usermeta={"minimum": 130 + _CELL * len(order[x])},
        encoding={
            "x": encode_nominal(x) | {"sort": order[x], "axis": {"labelAngle": -35}},
            "y": encode_nominal(y) | {"sort": order[y]},
        },
    )
