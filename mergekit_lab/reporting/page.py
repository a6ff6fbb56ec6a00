"""`report.html`: one self-contained page, readable offline, on a phone, on paper, in light and in dark.

`summary.md` is the same without pictures.

Jinja2 makes both from `templates/` and escapes whatever comes from outside (names, errors, configuration); the
scripts hold no data. A figure is a picture. If the reader has scripts, Vega-Lite draws the same in its place.
The page's policy allows the scripts and the style that it holds, by their hashes, and no more: no request, and
no text that becomes code.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergekit_lab.errors import say_duration
from mergekit_lab.reporting.drawing import Figure, load_chart
from mergekit_lab.reporting.leaderboard import build_table
from mergekit_lab.reporting.names import display_name
from mergekit_lab.reporting.origin import Origin
from mergekit_lab.reporting.published import HEADER, TITLE, Beside, format_numbers, list_bases
from mergekit_lab.reporting.records import Failure, Record, Timing
from mergekit_lab.reporting.summary import say_cache
from mergekit_lab.reporting.tables import Row, Table, to_percent
from mergekit_lab.reporting.writing import escape_cell, itemize, to_csv, to_latex, to_markdown

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATES = Path(__file__).parent / "templates"
_LIBRARY = tuple(
    Path(__file__).parent.parent / "assets" / "vega" / f"{name}.min.js"
    for name in ("vega", "vega-lite", "vega-embed")
)
FIGURE_BYTES = 3_500_000
"""What figures may add to the page; those beyond are named."""


@dataclass(frozen=True)
class Page:
    """All that a report shows.

    Attributes:
        summary: a paragraph.
        warnings: what looks like a mistake, a sentence each.
        published, published_notes: numbers of papers with ours, and what is to know of them.
        timings: by stage.
        configs: of runs, by name.
        origin, origins: how the page's results were made; those of the runs that it compares, by name.
        commands: what makes an evaluated model, by evaluation key.
    """

    title: str
    summary: str
    table: Table
    records: Sequence[Record]
    warnings: Sequence[str] = ()
    published: Sequence[Beside] = ()
    published_notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    timings: Mapping[str, Timing] = field(default_factory=dict)
    failures: Sequence[Failure] = ()
    configs: Mapping[str, str] = field(default_factory=dict)
    origin: Origin | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)


@cache
def _load_template(name: str) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    jinja = Environment(
        loader=PackageLoader("mergekit_lab.reporting"),
        autoescape=name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=name.endswith(".md.j2"),
    )
    jinja.filters |= {"display": display_name, "duration": say_duration, "percent": to_percent}
    jinja.filters |= {
        "cell": escape_cell,
        "items": itemize,
        "markdown": lambda table: to_markdown(table).rstrip(),
    }
    return jinja.get_template(name)


def _describe(page: Page) -> dict[str, Any]:
    """The content of both views."""
    return {
        **vars(page),
        "published": list(zip(page.published, format_numbers(page.published), strict=True)),
        "published_title": TITLE,
        "published_header": HEADER,
        "bases": list_bases(page.published),
        "cache": say_cache(page.records),
    }


def render_summary(page: Page) -> str:
    """The page without its pictures, in Markdown."""
    return _load_template("summary.md.j2").render(_describe(page))


def render_page(page: Page) -> str:
    """The page as text. Reads the figures' files."""
    table = page.table
    tables = {"": table, **_part_by_seed(table, page.records)}
    files = {"leaderboard.csv": to_csv(table), "leaderboard.tex": to_latex(table)}
    drawn, left_out = _embed(page.figures)
    names = ["page.js", *(["charts.js"] if any(each["chart"] for each in drawn) else [])]
    scripts = [(_TEMPLATES / name).read_text(encoding="utf-8") for name in names]
    if len(names) > 1:
        scripts[1:1] = [file.read_text(encoding="utf-8") for file in _LIBRARY]
    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    return _load_template("page.html.j2").render(
        _describe(page),
        policy=write_policy(style, scripts),
        style=style,
        scripts=scripts,
        drawn=drawn,
        left_out=left_out,
        row_id=id,
        makers={
            id(row): _list_commands(row, page.commands) for of_seed in tables.values() for row in of_seed.rows
        },
        tables=tables.items(),
        filters=_choose_filters(table, list(tables)[1:]),
        intervals=any(row.interval for row in table.rows),
        downloads={name: b64encode(text.encode()).decode("ascii") for name, text in files.items()},
    )


def write_policy(style: str, scripts: Sequence[str]) -> str:
    """A Content-Security-Policy that allows this style and these scripts, pictures in the page, and no more."""
    hashes = [
        f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (style, *scripts)
    ]
    return (
        f"default-src 'none'; img-src data:; style-src {hashes[0]}; script-src {' '.join(hashes[1:])}; "
        "base-uri 'none'; form-action 'none'"
    )


def _embed(figures: Sequence[Figure]) -> tuple[list[dict[str, Any]], list[str]]:
    """What the template shows of each figure, and the names of those that the page has no room for."""
    drawn: list[dict[str, Any]] = []
    left_out = []
    room = FIGURE_BYTES
    for figure in sorted(figures, key=lambda each: each.folded):
        source, chart = figure.source, load_chart(figure.path)
        size = len(source) + (len(json.dumps(chart)) if chart else 0)
        if size > room:
            left_out.append(figure.path.name)
            continue
        room -= size
        drawn.append({"text": figure.text, "folded": figure.folded, "source": source, "chart": chart})
    return drawn, left_out


def _list_commands(row: Row, commands: Mapping[str, str]) -> list[str]:
    """The commands of a row: one per seed, or several if the row is of several models."""
    return list(dict.fromkeys(commands[key] for _, _, key in row.evaluations if key in commands))


def _part_by_seed(table: Table, records: Sequence[Record]) -> dict[str, Table]:
    """The same table for every seed by itself; empty where there is one."""
    of_part = [record for record in records if record.part == table.part]
    seeds = sorted({record.seed for record in records})
    if len(seeds) < 2:
        return {}
    return {str(seed): build_table([r for r in of_part if r.seed == seed], like=table) for seed in seeds}


def _choose_filters(table: Table, seeds: Sequence[str]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Every axis with several values: its name, what stands for all of them, and (value, text) of each.

    The script shows them: without it nothing would happen.
    """
    filters = [
        (axis, "all", [(value, value) for value in dict.fromkeys(row.group[position] for row in table.rows)])
        for position, axis in enumerate(table.axes)
    ]
    if len(table.mergers) > 1:
        filters.append(("merger", "all", [(label, display_name(label)) for label in table.mergers]))
    if seeds:
        filters.append(("seed", "mean over seeds", [(seed, seed) for seed in seeds]))
    return filters
