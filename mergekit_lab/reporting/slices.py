"""Any two of a study's dimensions against each other, in text, CSV and LaTeX; the leaderboard in CSV and LaTeX.

`optimizer×merger` is a row for every optimizer and a column for every merger; its cells are means over tasks,
and over seeds with their standard deviation. What the two leave open must have one value, or be fixed:
`optimizer×task@merger:tsvm`.
"""

from __future__ import annotations

import csv
import io
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import TYPE_CHECKING

from mergekit_lab.errors import InputError, listing, suggestion
from mergekit_lab.reporting.records import KINDS, Record, deduplicate
from mergekit_lab.reporting.tables import (
    AXES,
    MISSING,
    Cell,
    Table,
    distinct_labels,
    markdown_line,
    markdown_text,
    marked,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

DIMENSIONS = (*AXES, "merger", "task", "seed")
MEASURES = ("normalized", "value")


@dataclass(frozen=True)
class Slice:
    """`cells[i][j]` belongs to `rows[i]` and `columns[j]`; of a column the best and the second are marked."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    note: str


def sliced(records: Iterable[Record], table: str, measure: str = "normalized") -> Slice:
    """Two dimensions of the records of the test split (of the only split, where there is no test).

    Args:
        table: `rows×columns` (or `rows*columns`), each of `DIMENSIONS`, and `@dimension:value` for each that is
            fixed; "merger" names references too.
        measure: "normalized" (value ÷ the task's expert) or "value", as a fraction.

    Raises:
        InputError: unknown names, a value that no record has, a third dimension that has several values, or
            several evaluations of one cell, seed and task.
    """
    names, fixed = asked(table, measure)
    everything = deduplicate(records)
    split = "test" if any(r.split == "test" for r in everything) or not everything else everything[0].split
    shown = _told_apart(_one_metric([record for record in everything if record.split == split]))
    shown = _narrowed(shown, fixed, table)
    _refuse_open(shown, names, table)
    rows, columns = (_values(shown, name) for name in names)
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in shown:
        found[_value(record, names[0]), _value(record, names[1])].append(record)
    tasks = {record.task for record in shown}
    for (row, column), members in found.items():
        _refuse_several(members, f"table={table}: {row}, {column}")
    cells = [[_cell(found[row, column], names, tasks, measure) for column in columns] for row in rows]
    references = {record.label for record in shown if record.kind != "merged"}
    ranked = [i for i, row in enumerate(rows) if names[0] != "merger" or row not in references]
    over = [what for what in ("task", "seed") if what not in names and len(_values(shown, what)) > 1]
    mean_of = f"; mean over {' and '.join(f'{each}s' for each in over)}" if over else ""
    said = "Accuracy ÷ the expert's" if measure == "normalized" else "Value"
    of = "".join(f", {name} {value}" for name, value in fixed.items())
    note = f"{said} in percent on the {split} split{of}{mean_of}."
    return Slice(" × ".join(names), rows, columns, _marked(cells, ranked), note)


def asked(table: str, measure: str = "normalized") -> tuple[tuple[str, str], dict[str, str]]:
    """The two dimensions that `rows×columns@dimension:value…` names, and the values of those that are fixed.

    Raises:
        InputError: unknown names or measure.
    """
    shape, *pins = table.replace("*", "×").split("@")
    names = [name.strip() for name in shape.split("×")]
    pairs = [pin.partition(":") for pin in pins]
    fixed = {name.strip(): value.strip() for name, _, value in pairs}
    for name in (*names, *fixed):
        if name not in DIMENSIONS:
            raise InputError(f"table={table}: {name!r} is no dimension{suggestion(name, DIMENSIONS)}")
    if len(names) != 2 or names[0] == names[1]:
        raise InputError(f"table={table} must be two dimensions, rows×columns, of {', '.join(DIMENSIONS)}")
    if len(fixed) < len(pairs) or {*names} & {*fixed} or not all(fixed.values()):
        raise InputError(f"table={table}: after @ stands another dimension, once, with its value: @merger:tsvm")
    if measure not in MEASURES:
        raise InputError(f"metric is {measure!r}{suggestion(measure, MEASURES)}")
    return (names[0], names[1]), fixed


def _narrowed(records: Sequence[Record], fixed: Mapping[str, str], table: str) -> list[Record]:
    kept = list(records)
    for name, value in fixed.items():
        known = _values(kept, name)
        if value not in known:
            raise InputError(f"table={table}: no record has {name} {value!r}{suggestion(value, known)}")
        kept = [record for record in kept if _value(record, name) == value]
    return kept


def _told_apart(records: Sequence[Record]) -> list[Record]:
    """Mergers that ran in several ways under one label get the labels that the leaderboard gives them."""
    names = distinct_labels(records)
    return [
        replace(record, merger=names.get((record.merger, record.model_key), record.merger))
        if record.merger is not None
        else record
        for record in records
    ]


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
                f"of the two, or fix it, table={table}@{axis}:VALUE"
            )


def _refuse_several(records: Sequence[Record], where: str) -> None:
    kept: dict[tuple[int, str], str] = {}
    for record in records:
        if kept.setdefault((record.seed, record.task), record.evaluation_key) != record.evaluation_key:
            raise InputError(
                f"{where}: {record.task}, seed {record.seed}, has several evaluations that differ in something "
                "no dimension names: report over runs that are equal in it"
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
        numbers = [record.normalized if measure == "normalized" else record.value for record in members]
        known = [number for number in numbers if number is not None]
        if len(known) == len(numbers) and {record.task for record in members} == needed:
            values.append(mean(known))
    if not values:
        return Cell()
    return Cell(mean(values), stdev(values) if len(values) > 1 else None)


def _marked(cells: Sequence[Sequence[Cell]], ranked: Sequence[int]) -> tuple[tuple[Cell, ...], ...]:
    """The best and the second of every column among the ranked rows, unless these are all equal."""
    lines = [list(row) for row in cells]
    for place in range(len(cells[0]) if cells else 0):
        column = marked([cells[line][place] for line in ranked])
        if any(cell.mean is not None and not cell.best for cell in column):
            for line, cell in zip(ranked, column, strict=True):
                lines[line][place] = cell
    return tuple(map(tuple, lines))


def slice_markdown(found: Slice) -> str:
    """A GitHub-flavored table; the best of a column is bold."""
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
    for name, row in zip(found.rows, found.cells, strict=True):
        lines.append([_latex_text(name), *map(_latex_cell, row)])
    return _tabular([found.title, *found.columns], [lines], 1, found.note)


def table_csv(table: Table) -> str:
    """The leaderboard, in fractions; after every column one of standard deviations."""
    columns = [f"{column}{end}" for column in table.columns for end in ("", " sd")]
    out = io.StringIO()
    writer = csv.DictWriter(out, [*table.axes, "model", *columns, "coefficient"])
    writer.writeheader()
    writer.writerows(table.as_rows())
    return out.getvalue()


def table_latex(table: Table) -> str:
    """The leaderboard as a `booktabs` table: groups apart, in each the best merger of a column bold, the second
    underlined."""
    names = len(table.axes) + 1
    groups: Mapping[tuple[str, ...], list[list[str]]] = {group: [] for group in table.groups}
    for row in table.rows:
        labels = [_latex_text(label) for label in (*row.group, row.label)]
        cells = map(_latex_cell, row.cells)
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


def _latex_cell(cell: Cell) -> str:
    text = cell.text.replace("±", "$\\pm$").replace(MISSING, "--")
    return f"\\textbf{{{text}}}" if cell.best else f"\\underline{{{text}}}" if cell.second else text


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "×": r"$\times$", "α": r"$\alpha$",
    "\n": " ",
}  # fmt: skip


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def print_slice(found: Slice, console: Console | None = None) -> None:
    """Print with rich; what is too wide for the terminal in tables below each other."""
    from rich.console import Console

    console = console or Console()
    for drawn in _fitting(found, console):
        console.print(drawn)
    console.print(found.note, style="dim", markup=False, highlight=False)


def _fitting(found: Slice, console: Console) -> Iterator[RichTable]:
    """As few tables as fit the terminal's width, each of as many columns as fit, one at the least."""
    unlimited = console.options.update(max_width=sys.maxsize)
    first = 0
    while True:
        end = first + 1
        while end < len(found.columns) and (
            console.measure(_drawn(found, first, end + 1), options=unlimited).maximum <= console.width
        ):
            end += 1
        yield _drawn(found, first, end)
        first = end
        if first >= len(found.columns):
            return


def _drawn(found: Slice, first: int, end: int) -> RichTable:
    """The columns from `first` to before `end`."""
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(header_style="bold")
    drawn.add_column(Text(found.title), overflow="fold")
    for name in found.columns[first:end]:
        drawn.add_column(Text(name), justify="right", overflow="fold")
    for name, row in zip(found.rows, found.cells, strict=True):
        texts = [
            Text(cell.text, style="bold green" if cell.best else "underline" if cell.second else "")
            for cell in row[first:end]
        ]
        drawn.add_row(Text(name), *texts)
    return drawn
