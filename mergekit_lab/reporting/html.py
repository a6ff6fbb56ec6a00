"""`report.html`: one self-contained page, readable offline, on a phone, in light and in dark.

Everything that comes from outside (names, errors, configuration) passes through `escape`; the script
holds no data.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mergekit_lab.reporting.published import HEADER, TITLE, Beside, cells
from mergekit_lab.reporting.records import Failure, Record, Timing
from mergekit_lab.reporting.tables import Row, Table, comparison_table


@dataclass(frozen=True)
class Figure:
    """A PNG file and the sentence that stands for it where it cannot be seen."""

    path: Path
    text: str
    folded: bool = False
    """Shown only when the reader opens it."""


def page(
    title: str,
    summary: str,
    table: Table,
    *,
    published: Sequence[Beside] = (),
    figures: Sequence[Figure],
    records: Sequence[Record],
    timings: Mapping[str, Timing],
    failures: Sequence[Failure],
    configs: Mapping[str, str],
) -> str:
    """The whole page as text; `configs` are of runs by name. Reads the figures' files."""
    sections = [
        f"<h1>{escape(title)}</h1>\n<p>{escape(summary)}</p>",
        _leaderboard(table, _by_seed(table, records)),
        _published(published),
        _figures(figures),
        _failures(failures),
        _costs(records, timings),
        _configs(configs),
        _keys(records),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _by_seed(table: Table, records: Sequence[Record]) -> dict[int, Table]:
    """The same table for every seed by itself; empty where there is one."""
    seeds = sorted({record.seed for record in records})
    if len(seeds) < 2:
        return {}
    split = table.split
    return {
        seed: comparison_table([r for r in records if r.seed == seed and r.split == split], like=table)
        for seed in seeds
    }


def _leaderboard(table: Table, by_seed: Mapping[int, Table]) -> str:
    if not table.rows:
        return ""
    sure = any(row.interval for row in table.rows)
    headings = "".join(_heading(name) for name in (*table.axes, "model")) + "".join(
        _heading(name, "number")
        for name in _means_first(table.columns, "coefficient", _INTERVAL if sure else "")
    )
    rows = "\n".join(
        _leaderboard_row(row, "" if seed is None else str(seed), sure)
        for seed, of_seed in [(None, table), *by_seed.items()]
        for row in of_seed.rows
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f'<h2 id="leaderboard">Leaderboard</h2>\n{_filters(table, by_seed)}'
        f'<div class="wide" tabindex="0" role="region" aria-labelledby="leaderboard">\n'
        f'<table class="sortable">\n<caption>Choose a heading to sort, again to reverse.</caption>\n'
        f"<thead><tr>{headings}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>\n"
        f'<ul class="notes">{notes}</ul>'
    )


def _published(rows: Sequence[Beside]) -> str:
    if not rows:
        return ""
    headings = "".join(_heading(name, "number" if i > 3 else "name") for i, name in enumerate(HEADER))
    lines = []
    for row, texts in zip(rows, cells(rows), strict=True):
        names = "".join(f"<td>{escape(text)}</td>" for text in texts[:4])
        values = zip(texts[4:], (row.published, row.ours, row.difference), strict=True)
        lines.append(f"<tr>{names}{''.join(_number(text, value) for text, value in values)}</tr>")
    body = "\n".join(lines)
    return (
        f'<h2 id="published">{TITLE}</h2>\n'
        f'<div class="wide" tabindex="0" role="region" aria-labelledby="published">\n'
        f'<table class="sortable">\n<thead><tr>{headings}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n'
        "</div>"
    )


def _filters(table: Table, by_seed: Mapping[int, Table]) -> str:
    """A choice for every axis with several values; shown by the script, without which nothing would happen."""
    choices = [
        (axis, "all", list(dict.fromkeys(row.group[place] for row in table.rows)))
        for place, axis in enumerate(table.axes)
    ]
    if len(table.mergers) > 1:
        choices.append(("merger", "all", list(table.mergers)))
    if by_seed:
        choices.append(("seed", "mean over seeds", [str(seed) for seed in by_seed]))
    if not choices:
        return ""
    fields = "".join(
        f'<label>{escape(name)} <select data-filter="{escape(name)}"><option value="">{nothing}</option>'
        + "".join(f'<option value="{escape(value)}">{escape(value)}</option>' for value in options)
        + "</select></label>"
        for name, nothing, options in choices
    )
    return f'<form class="filters" hidden>{fields}<output aria-live="polite"></output></form>\n'


def _leaderboard_row(row: Row, seed: str, sure: bool) -> str:
    group = "".join(f"<td>{escape(name)}</td>" for name in row.group)
    chosen = _number(row.coefficient, row.coefficients[0] if row.coefficients else None)
    interval = _number(*_interval(row)) if sure else ""
    numbers = [_number(cell.text, cell.mean, best=cell.best) for cell in row.cells]
    cells = "".join(_means_first(numbers, chosen, interval))
    kind = "" if row.kind == "merged" else ' class="reference"'
    merger = escape(row.label) if row.kind == "merged" else ""
    state = f' data-merger="{merger}" data-seed="{seed}"' + (" hidden" if seed else "")
    return f'<tr{kind}{state}>{group}<th scope="row">{escape(row.label)}</th>{cells}</tr>'


_INTERVAL = "average, 95 %"


def _interval(row: Row) -> tuple[str, float | None]:
    if row.interval is None:
        return "–", None
    low, high = (f"{100 * value:.1f}" for value in row.interval)
    close = '<abbr title="not distinguishable from the best">≈</abbr> ' if row.close else ""
    return f"{close}{low} to {high}", row.interval[0]


def _means_first(columns: Sequence[str], coefficient: str, interval: str) -> list[str]:
    """The means and the coefficient before the tasks: a narrow screen shows the left of a table."""
    return [columns[-2], *filter(None, [interval]), columns[-1], coefficient, *columns[:-2]]


def _heading(name: str, kind: str = "name") -> str:
    return (
        f'<th scope="col" class="{kind}" aria-sort="none"><button type="button">{escape(name)}'
        f'<span aria-hidden="true"></span></button></th>'
    )


def _number(text: str, value: float | None, best: bool = False) -> str:
    shown = f'<strong>{text}<span class="unseen"> (best merger)</span></strong>' if best else text
    return f'<td class="number" data-value="{"" if value is None else repr(value)}">{shown}</td>'


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    opened = "\n".join(_figure(figure) for figure in figures if not figure.folded)
    folded = "\n".join(_figure(figure) for figure in figures if figure.folded)
    more = f"<details><summary>More figures</summary>\n{folded}\n</details>" if folded else ""
    return f"<h2>Figures</h2>\n{opened}\n{more}"


def _figure(figure: Figure) -> str:
    return (
        f'<figure><img alt="{escape(figure.text)}" '
        f'src="data:image/png;base64,{b64encode(figure.path.read_bytes()).decode("ascii")}">'
        f"<figcaption>{escape(figure.text)}</figcaption></figure>"
    )


def _failures(failures: Sequence[Failure]) -> str:
    if not failures:
        return ""
    items = "\n".join(
        f"<li><strong>{escape(failure.run)}</strong>"
        + (f" <code>{escape(' '.join(failure.overrides))}</code>" if failure.overrides else "")
        + f"<pre>{escape(failure.error)}</pre></li>"
        for failure in failures
    )
    return f"<h2>Failures</h2>\n<ul>\n{items}\n</ul>"


def _costs(records: Sequence[Record], timings: Mapping[str, Timing]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(stage)}</th><td class="number">{duration(timing.seconds)}</td>'
        f'<td class="number">{timing.computed}</td><td class="number">{timing.reused}</td></tr>'
        for stage, timing in timings.items()
    )
    headings = "".join(
        f'<th scope="col" class="number">{name}</th>' for name in ("wall time", "computed", "reused")
    )
    table = (
        ""
        if not rows
        else f'<div class="wide"><table><thead><tr><th scope="col">stage</th>{headings}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    return f"<h2>Time and cache</h2>\n<p>{escape(cache_sentence(records))}</p>\n{table}"


def cache_sentence(records: Sequence[Record]) -> str:
    """How many evaluations came from the store, what they had cost, and the largest memory peak."""
    found = [record for record in records if record.reused]
    peaks = [record.peak_memory_bytes for record in records if record.peak_memory_bytes is not None]
    peak = f" The largest memory peak was {max(peaks) / 2**30:.2f} GiB." if peaks else ""
    return (
        f"{len(found)} of {len(records)} evaluations were found in the store; computing them had taken "
        f"{duration(sum(record.wall_seconds for record in found))}.{peak}"
    )


def duration(seconds: float) -> str:
    """ "0.4 s", "12 s", "3 min 05 s", "2 h 07 min"."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _configs(configs: Mapping[str, str]) -> str:
    """Folded, one a run."""
    return "\n".join(
        f"<details><summary>Configuration{escape(f' of {run}' if run else '')}</summary>"
        f"<pre>{escape(text)}</pre></details>"
        for run, text in configs.items()
        if text.strip()
    )


def _keys(records: Sequence[Record]) -> str:
    """Which artifact every number is of: hashes of all that decides it."""
    if not records:
        return ""
    lines = [
        " ".join((r.backbone, r.finetuning, r.optimizer, f"seed={r.seed}", r.label, r.task))
        + f"  model {r.model_key}  evaluation {r.evaluation_key}"
        for r in records
    ]
    text = escape("\n".join(lines))
    return (
        "<details><summary>Hashes</summary><p>Keys of models and evaluations in the store, each a hash of "
        f"everything that decides it.</p><pre>{text}</pre></details>"
    )


_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_STYLE = """
:root { --ink: #1c2024; --soft: #5b636b; --page: #ffffff; --line: #d8dde2; --tint: #f2f5f8; --best: #00583f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #a3abb3; --page: #14181c; --line: #39414a; --tint: #1e242a;
          --best: #6fd3ae; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 84rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
p { max-width: 48rem; overflow-wrap: anywhere; }
.filters { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: center; margin: 0 0 .7rem; }
.filters[hidden] { display: none; }
.filters select { font: inherit; max-width: 14rem; color: inherit; background: var(--tint);
                  border: 1px solid var(--line); border-radius: .3rem; padding: .2rem .3rem; }
.filters output { color: var(--soft); font-size: .9rem; }
.wide { position: relative; overflow-x: auto; border: 1px solid var(--line); border-radius: .4rem; }
.wide > table > caption { position: sticky; left: 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .4rem .7rem; color: var(--soft); }
th, td { padding: .3rem .6rem; text-align: left; white-space: nowrap; border-top: 1px solid var(--line); }
th { font-weight: 600; }
thead th { background: var(--tint); vertical-align: bottom; }
thead th:has(button) { padding: 0; }
thead button { all: unset; box-sizing: border-box; width: 100%; padding: .4rem .6rem; cursor: pointer; }
thead button:focus-visible, .wide:focus-visible { outline: 2px solid #3b82c4; outline-offset: -2px; }
thead button:hover { text-decoration: underline; }
th[aria-sort=ascending] span::after { content: " \\25B2"; }
th[aria-sort=descending] span::after { content: " \\25BC"; }
tbody th { position: sticky; left: 0; background: var(--page); }
tr.reference th { background: var(--tint); }
.number { text-align: right; }
tr.reference { color: var(--soft); background: var(--tint); }
tbody strong { color: var(--best); }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.notes { color: var(--soft); font-size: .9rem; padding-left: 1.2rem; overflow-wrap: anywhere; }
figure { margin: 0 0 1.5rem; }
figure img { max-width: min(100%, 62rem); height: auto; padding: .3rem; }
figure img { background: #ffffff; border-radius: .4rem; }
figcaption { color: var(--soft); font-size: .9rem; overflow-wrap: anywhere; }
pre { overflow-x: auto; padding: .8rem; background: var(--tint); border-radius: .4rem; font-size: .85rem; }
code { overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; margin-top: 2rem; }
"""

_SCRIPT = """
for (const form of document.querySelectorAll("form.filters")) {
  const table = document.querySelector("table.sortable"), rows = [...table.tBodies[0].rows];
  const selects = [...form.querySelectorAll("select")], names = selects.map(each => each.dataset.filter);
  const titles = [...table.tHead.rows[0].cells].map(cell => cell.textContent);
  const fits = (row, name, wanted) => {
    if (name === "seed") return row.dataset.seed === wanted;
    if (wanted === "") return true;
    if (name === "merger") return row.dataset.merger === "" || row.dataset.merger === wanted;
    return row.cells[titles.indexOf(name)].textContent === wanted;
  };
  const apply = () => {
    let shown = 0;
    for (const row of rows) {
      row.hidden = !selects.every((each, place) => fits(row, names[place], each.value));
      if (!names.includes("seed") && row.dataset.seed !== "") row.hidden = true;
      shown += !row.hidden;
    }
    form.querySelector("output").textContent = `${shown} rows`;
  };
  form.hidden = false;
  form.addEventListener("change", apply);
  form.addEventListener("submit", event => event.preventDefault());
  apply();
}
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
    const numeric = "value" in body.rows[0].cells[column].dataset;
    const before = heading.getAttribute("aria-sort");
    const down = before === "none" ? numeric : before === "ascending";
    headings.forEach(other => other.setAttribute("aria-sort", "none"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => numeric ? row.cells[column].dataset.value : row.cells[column].textContent;
    const sign = down ? -1 : 1;
    body.append(...[...body.rows].sort((a, b) => {
      const x = key(a), y = key(b);
      if (numeric && (x === "" || y === "")) return (x === "") - (y === "");
      return sign * (numeric ? x - y : x.localeCompare(y, undefined, {numeric: true}));
    }));
  }));
}
"""
