"""Figures as files: vl-convert makes pictures of their Vega-Lite, without a browser or a request."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergekit_lab.reporting.encoding import Chart
from mergekit_lab.reporting.records import write_text

SUFFIX = ".vl.json"
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_CONFIG: Chart = {
    "background": "white",
    "padding": 8,
    "font": "Liberation Sans, Arial, Helvetica, sans-serif",
    "axis": {
        "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 140,
        "labelColor": "#222222", "titleColor": "#222222", "gridColor": "#DDDDDD", "domainColor": "#888888",
        "tickColor": "#888888", "labelOverlap": "greedy",
    },
    "legend": {
        "orient": "bottom", "labelFontSize": 12, "labelLimit": 150, "symbolLimit": 60, "title": None,
        "labelColor": "#222222", "layout": {"bottom": {"direction": "vertical", "anchor": "start"}},
    },
    "title": {"anchor": "start", "fontSize": 13, "color": "#222222"},
    "text": {"fontSize": 11, "color": "#222222"},
    "view": {"stroke": None},
}  # fmt: skip
_LEGEND_COLUMN = 175
"""The pixels that a name in a legend takes."""
_WIDTHS = {1: 600, 2: 400, 3: 320}
"""The width of a panel in pixels, by the number of columns."""
_SCALE = 1.5
"""A PNG has so many pixels per pixel of the figure."""


@dataclass(frozen=True)
class Figure:
    """A PNG file, and a sentence for those who cannot see it."""

    path: Path
    text: str
    folded: bool = False
    """Shown only when the reader opens it."""

    @property
    def source(self) -> str:
        """The picture as a `data:` address: its SVG, which is smaller, if there is one."""
        svg = self.path.with_suffix(".svg")
        kind, file = ("svg+xml", svg) if svg.is_file() else ("png", self.path)
        return f"data:image/{kind};base64,{b64encode(file.read_bytes()).decode('ascii')}"


def save_figure(path: Path, title: str, panels: Sequence[Chart], columns: int = 3) -> Path:
    """Write a figure as `path`, a PNG, and as SVG, PDF and Vega-Lite beside it.

    SVG and PDF are for papers, whose captions say what a figure shows, so they have no title.
    """
    import vl_convert

    path.parent.mkdir(parents=True, exist_ok=True)
    chart = _arrange(panels, columns)
    chart["title"] = {"text": title, "fontSize": 15, "offset": 12}
    write_text(path.with_suffix(SUFFIX), json.dumps(chart, ensure_ascii=False) + "\n")
    for panel in chart["concat"]:  # invisible marks only show tooltips, which files do not have
        panel["layer"] = [layer for layer in panel["layer"] if layer["mark"].get("opacity") != 0]
    titled = vl_convert.vegalite_to_svg(chart, allowed_base_urls=[])
    path.write_bytes(vl_convert.svg_to_png(titled, scale=_SCALE))
    del chart["title"]
    plain = vl_convert.vegalite_to_svg(chart, allowed_base_urls=[])
    write_text(path.with_suffix(".svg"), plain)
    path.with_suffix(".pdf").write_bytes(vl_convert.svg_to_pdf(plain))
    return path


def _arrange(panels: Sequence[Chart], columns: int) -> Chart:
    """Arrange panels in columns, four panels in two. Panels with the same legend share one."""
    columns = min(2 if len(panels) == 4 else columns, max(len(panels), 1))
    wide = _WIDTHS[columns]
    scales = sorted({scale for panel in panels for scale in _find_scales(panel)})
    counts = Counter((channel, field) for channel, field, _ in scales)
    differ = {field for (_, field), count in counts.items() if count > 1}
    names = wide if "name" in differ else wide * columns
    return {
        "$schema": _SCHEMA,
        "config": _CONFIG | {"legend": _CONFIG["legend"] | {"columns": names // _LEGEND_COLUMN}},
        "columns": columns,
        "concat": [
            {"width": max(wide, panel.get("usermeta", {}).get("minimum", 0))} | panel for panel in panels
        ],
        "resolve": {
            "scale": {channel: "independent" if field in differ else "shared" for channel, field, _ in scales}
        },
    }


def _find_scales(panel: Chart) -> Iterator[tuple[str, str, str]]:
    """What a legend explains: channel, field and scale."""
    for layer in panel["layer"]:
        for channel in ("color", "shape", "strokeDash", "opacity"):
            encoding = layer.get("encoding", {}).get(channel, {})
            if "field" in encoding:
                yield channel, encoding["field"], json.dumps(encoding["scale"])


def load_chart(picture: Path) -> Chart | None:
    """The description next to a picture; None if there is nothing to draw."""
    try:
        chart = json.loads(picture.with_suffix(SUFFIX).read_text(encoding="utf-8"))
        panels = all(isinstance(panel, dict) for panel in chart["concat"])
        return chart if panels and isinstance(chart["title"]["text"] + chart["config"]["font"], str) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def make_title(group: Sequence[str], what: str) -> str:
    """A figure's title: the group, if there is one, and what the figure shows."""
    return ": ".join(filter(None, (" / ".join(filter(None, group)), what)))


def name_files(
    folder: Path, stem: str, groups: Sequence[tuple[str, ...]]
) -> list[tuple[Path, tuple[str, ...]]]:
    """A file for every group, named by its number, so that names differ, and by the group, for readers."""
    files = []
    for number, group in enumerate(groups, start=1):
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(group)).strip("-.")[:60]
        parts = [stem, str(number), name] if len(groups) > 1 else [stem]
        files.append((folder / f"{'-'.join(filter(None, parts))}.png", group))
    return files
