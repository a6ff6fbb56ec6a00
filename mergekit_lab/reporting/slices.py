"""Any two of a study's dimensions against each other, in text, CSV and LaTeX.

`optimizer×merger` is a row for every optimizer and a column for every merger; its cells are means over tasks,
and over seeds with their standard deviation. What the two leave open must have one value.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import TYPE_CHECKING

from mergekit_lab.errors import InputError, listing, suggestion
from mergekit_lab.reporting.records import KINDS, Record, deduplicate
from mergekit_lab.reporting.tables import AXES, MISSING, Cell, Table, markdown_line, markdown_text

if TYPE_CHECKING:
    from rich.console import Console

DIMENSIONS = (*AXES, "merger", "task", "seed")
MEASURES = ("normalised", "value")


@dataclass(frozen=True)
class Slice:
    """`cells[i][j]` belongs to `rows[i]` and `columns[j]`; the best of a column and the second are known."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    seconds: frozenset[tuple[int, int]]
    """Places of the second best of their column."""
    note: str


def sliced(records: Iterable[Record], table: str, measure: str = "normalised") -> Slice:
    """Two dimensions of the records of the test split (of the only split, where there is no test).

    Args:
        table: `rows×columns` (or `rows*columns`), each of `DIMENSIONS`; "merger" names references too.
        measure: "normalised" (value ÷ the task's expert) or "value", as a fraction.

    Raises:
        InputError: unknown names, or a third dimension that has several values.
    """
    names = table.replace("*", "×").split("×")
    for name in names:
        if name not in DIMENSIONS:
            raise InputError(f"table={table}: {name!r} is no dimension{suggestion(name, DIMENSIONS)}")
    if len(names) != 2 or names[0] == names[1]:
        raise InputError(f"table={table} must be two dimensions, rows×columns, of {', '.join(DIMENSIONS)}")
    if measure not in MEASURES:
        raise InputError(f"metric is {measure!r}{suggestion(measure, MEASURES)}")
    everything = deduplicate(records)
    split = "test" if any(r.split == "test" for r in everything) or not everything else everything[0].split
    shown = _one_metric([record for record in everything if record.split == split])
    _refuse_open(shown, names, table)
    rows, columns = (_values(shown, name) for name in names)
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in shown:
        found[_value(record, names[0]), _value(record, names[1])].append(record)
    tasks = {record.task for record in shown}
    cells = [[_cell(found[row, column], names, tasks, measure) for column in columns] for row in rows]
    marked, seconds = _marked(cells)
    over = [what for what in ("task", "seed") if what not in names and len(_values(shown, what)) > 1]
    mean_of = f"; mean over {' and '.join(f'{each}s' for each in over)}" if over else ""
    said = "Accuracy ÷ the expert's" if measure == "normalised" else "Value"
    note = f"{said} in percent on the {split} split{mean_of}."
    return Slice(" × ".join(names), rows, columns, marked, seconds, note)


def _one_metric(records: Sequence[Record]) -> list[Record]:
    """Of a task with several metrics the first met counts, as in the leaderboard."""
    metric: dict[str, str] = {}
    for record in records:
        metric.setdefault(record.task, record.metric)
    return [record for record in records if record.metric == metric[record.task]]


def _refuse_open(records: Sequence[Record], names: Sequence[str], table: str) -> None:
    for axis in (*AXES, "merger"):
        values = _values(records, axis)
        if axis not in names and len(values) > 1:
            raise InputError(
                f"table={table} leaves {axis} open, which has several values ({listing(values)}): make it one "
                "of the two, or report over runs of one"
            )


def _value(record: Record, name: str) -> str:
    return record.label if name == "merger" else str(getattr(record, name))


def _values(records: Sequence[Record], name: str) -> tuple[str, ...]:
    """In order of appearance; models in the order of a table: zero-shot, experts, mergers, joint."""
    ordered = sorted(records, key=lambda r: KINDS.index(r.kind)) if name == "merger" else records
    if name == "seed":
        ordered = sorted(records, key=lambda r: r.seed)
    return tuple(dict.fromkeys(_value(record, name) for record in ordered))


def _cell(records: Sequence[Record], names: Sequence[str], tasks: set[str], measure: str) -> Cell:
    """Over seeds, of seeds that have every task the cell needs."""
    by_seed: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_seed[record.seed].append(record)
    needed = {record.task for record in records} if "task" in names else tasks
    values = []
    for members in by_seed.values():
        numbers = [record.normalised if measure == "normalised" else record.value for record in members]
        known = [number for number in numbers if number is not None]
        if len(known) == len(numbers) and {record.task for record in members} == needed:
            values.append(mean(known))
    if not values:
        return Cell()
    return Cell(mean(values), stdev(values) if len(values) > 1 else None)


def _marked(cells: Sequence[Sequence[Cell]]) -> tuple[tuple[tuple[Cell, ...], ...], frozenset[tuple[int, int]]]:
    """The best and the second of every column, at the precision shown, where there are three rows or more."""
    marked = [list(row) for row in cells]
    seconds = set()
    for place in range(len(cells[0]) if cells else 0):
        shown = [None if row[place].mean is None else round(row[place].mean or 0.0, 3) for row in cells]
        ranks = sorted({value for value in shown if value is not None}, reverse=True)
        for line, value in enumerate(shown):
            if len(ranks) > 1 and value == ranks[0]:
                marked[line][place] = replace(cells[line][place], best=True)
            if len(ranks) > 2 and value == ranks[1]:
                seconds.add((line, place))
    return tuple(map(tuple, marked)), frozenset(seconds)


def slice_markdown(found: Slice) -> str:
    """A GitHub-flavoured table; the best of a column is bold."""
    lines = [markdown_line([markdown_text(name) for name in (found.title, *found.columns)])]
    lines.append(markdown_line(["---", *["---:"] * len(found.columns)]))
    for name, row in zip(found.rows, found.cells, strict=True):
        lines.append(
            markdown_line([markdown_text(name), *(f"**{c.text}**" if c.best else c.text for c in row)])
        )
    return "\n".join([*lines, "", f"- {found.note}"]) + "\n"


def slice_csv(found: Slice) -> str:
    """Fractions, not percent; after every column one of standard deviations, where seeds have some."""
    spread = any(cell.sd is not None for row in found.cells for cell in row)
    header = [found.title]
    for name in found.columns:
        header += [name, f"{name} sd"] if spread else [name]
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(header)
    for name, row in zip(found.rows, found.cells, strict=True):
        numbers = [[cell.mean, cell.sd] if spread else [cell.mean] for cell in row]
        writer.writerow([name, *("" if n is None else n for pair in numbers for n in pair)])
    return out.getvalue()


def slice_latex(found: Slice) -> str:
    """A `booktabs` table: the best of a column bold, the second underlined."""
    lines = []
    for i, (name, row) in enumerate(zip(found.rows, found.cells, strict=True)):
        cells = [_latex_cell(cell, (i, j) in found.seconds) for j, cell in enumerate(row)]
        lines.append([_latex_text(name), *cells])
    return _tabular([found.title, *found.columns], [lines], 1, found.note)


def table_latex(table: Table) -> str:
    """The leaderboard as a `booktabs` table: the best merger of a column bold, groups apart."""
    names = len(table.axes) + 1
    groups: Mapping[tuple[str, ...], list[list[str]]] = {group: [] for group in table.groups}
    for row in table.rows:
        labels = [_latex_text(label) for label in (*row.group, row.label)]
        cells = [_latex_cell(cell, False) for cell in row.cells]
        groups[row.group].append([*labels, *cells, row.coefficient.replace(MISSING, "--")])
    return _tabular(table.header, list(groups.values()), names, " ".join(table.notes))


def _tabular(header: Sequence[str], groups: Sequence[Sequence[Sequence[str]]], names: int, note: str) -> str:
    columns = "l" * names + "r" * (len(header) - names)
    bodies = ["".join(f"{' & '.join(line)} \\\\\n" for line in lines) for lines in groups]
    heads = " & ".join(map(_latex_text, header))
    comment = "".join(f"% {line}\n" for line in note.splitlines())
    return (
        f"{comment}\\begin{{tabular}}{{{columns}}}\n\\toprule\n{heads} \\\\\n\\midrule\n"
        + "\\midrule\n".join(bodies)
        + "\\bottomrule\n\\end{tabular}\n"
    )


def _latex_cell(cell: Cell, second: bool) -> str:
    text = cell.text.replace("±", "$\\pm$").replace(MISSING, "--")
    return f"\\textbf{{{text}}}" if cell.best else f"\\underline{{{text}}}" if second else text


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "×": r"$\times$", "α": r"$\alpha$",
    "\n": " ",
}  # fmt: skip


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def print_slice(found: Slice, console: Console | None = None) -> None:
    """Print with rich."""
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(header_style="bold")
    drawn.add_column(Text(found.title), no_wrap=True)
    for name in found.columns:
        drawn.add_column(Text(name), justify="right", no_wrap=True)
    for i, (name, row) in enumerate(zip(found.rows, found.cells, strict=True)):
        styles = [
            "bold green" if c.best else "underline" if (i, j) in found.seconds else ""
            for j, c in enumerate(row)
        ]
        drawn.add_row(Text(name), *(Text(c.text, style=s) for c, s in zip(row, styles, strict=True)))
    console = console or Console()
    console.print(drawn)
    console.print(found.note, style="dim", markup=False, highlight=False)
