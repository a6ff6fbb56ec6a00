"""Any two of a study's dimensions against each other.

`optimizer×merger` has a row for every optimizer and a column for every merger. Cells are means over tasks, and
over seeds with their standard deviation. Every other dimension must have one value in the records, or be fixed:
`optimizer×task@merger:tsvm`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mergekit_lab.errors import InputError, join_names, suggest
from mergekit_lab.reporting.leaderboard import (
    distinguish_mergers,
    keep_first_metric,
    mark_best,
    note_strengths,
    select_part,
    summarize,
)
from mergekit_lab.reporting.names import display_name
from mergekit_lab.reporting.records import KINDS, Record
from mergekit_lab.reporting.tables import AXES, Cell, Line, Sheet

DIMENSIONS = (*AXES, "merger", "task", "seed")
"""What rows and columns of a cross table may be."""
MEASURES = ("normalized", "value")
"""What its cells may show."""


@dataclass(frozen=True)
class CrossTable:
    """`cells[i][j]` belongs to `rows[i]` and `columns[j]`; of a column the best and the second are marked."""

    dimensions: tuple[str, str]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]
    references: frozenset[str] = frozenset()
    """Rows and columns of models that no merger made: they are never marked."""

    def make_sheet(self, name: Callable[[str], str] = display_name) -> Sheet:
        """The table to write; `name` returns a merger's display name."""
        shown = [name if dimension == "merger" else str for dimension in self.dimensions]
        lines = tuple(
            Line((shown[0](row),), cells, reference=row in self.references)
            for row, cells in zip(self.rows, self.cells, strict=True)
        )
        columns = tuple(map(shown[1], self.columns))
        title = " × ".join(self.dimensions)
        return Sheet((title,), columns, (), (lines,), self.notes, tuple(range(len(columns))))


def tabulate_across(records: Iterable[Record], table: str, measure: str = "normalized") -> CrossTable:
    """Tabulate two dimensions of the records of the test part, or of the only part if there is no test.

    If experts differ in strength, cells show the value beside the share.

    Args:
        table: `rows×columns` (or `rows*columns`), each of `DIMENSIONS`, and `@dimension:value` for each that is
            fixed; "merger" names references too.
        measure: "normalized" (value ÷ the task's expert) or "value", as a fraction.

    Raises:
        InputError: unknown names, a value that no record has, a third dimension that has several values, or
            several evaluations of one cell, seed and task.
    """
    names, fixed = parse_table(table, measure)
    part, of_part = select_part(records)
    shown = _narrow(distinguish_mergers(keep_first_metric(of_part)), fixed, table)
    _refuse_open(shown, names, table)
    rows, columns = (_list_values(shown, name) for name in names)
    by_cell = _group_by_cell(shown, names, table)
    tasks = {record.task for record in shown}

    def fill(measure: str) -> list[list[Cell]]:
        return [
            [
                summarize(members, {r.task for r in members} if "task" in names else tasks, measure)
                for members in (by_cell[row, column] for column in columns)
            ]
            for row in rows
        ]

    cells, notes = fill(measure), []
    if measure == "normalized":
        notes = _note_strengths(fill("expert_value"), names)
        if notes:
            cells = [
                [replace(share, plain=value.mean) for share, value in zip(*lines, strict=True)]
                for lines in zip(cells, fill("value"), strict=True)
            ]
    references = frozenset(r.label for r in shown if r.kind != "merged" and "merger" in names)
    over = [what for what in ("task", "seed") if what not in names and len(_list_values(shown, what)) > 1]
    mean_of = f"; mean over {' and '.join(f'{each}s' for each in over)}" if over else ""
    what = "Accuracy ÷ the expert's" if measure == "normalized" else "Value"
    what += " (and the value itself)" if notes else ""
    of = "".join(f", {name} {value}" for name, value in fixed.items())
    first = f"{what} in percent on the {part} part{of}{mean_of}."
    ranked = [line for row, line in zip(rows, cells, strict=True) if row not in references]
    for j, column in enumerate(columns):
        marked = mark_best([line[j] for line in ranked])
        if column not in references and any(cell.mean is not None and not cell.best for cell in marked):
            for line, cell in zip(ranked, marked, strict=True):
                line[j] = cell
    return CrossTable(names, rows, columns, tuple(map(tuple, cells)), (first, *notes), references)


def _group_by_cell(
    records: Iterable[Record], names: tuple[str, str], table: str
) -> dict[tuple[str, ...], list[Record]]:
    """The records of each cell. Refuse different evaluations of one cell, seed and task."""
    by_cell: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    kept: dict[tuple[Any, ...], str] = {}
    for record in records:
        pair = tuple(_read_value(record, name) for name in names)
        by_cell[pair].append(record)
        where = (*pair, record.task, record.seed)
        if kept.setdefault(where, record.evaluation_key) != record.evaluation_key:
            raise InputError(
                f"table={table}: {', '.join(pair)}: {record.task}, seed {record.seed}, has several evaluations "
                "that differ outside the table's dimensions: report over fewer runs"
            )
    return by_cell


def _note_strengths(strengths: Sequence[Sequence[Cell]], names: tuple[str, str]) -> list[str]:
    """A note where cells that are compared have experts of different strength; tasks are not compared."""
    if "task" not in names:
        return note_strengths(cell.mean for row in strengths for cell in row)
    lines = strengths if names[0] == "task" else zip(*strengths, strict=True)
    return [note for line in lines for note in note_strengths(cell.mean for cell in line)][:1]


def parse_table(table: str, measure: str = "normalized") -> tuple[tuple[str, str], dict[str, str]]:
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
            raise InputError(f"table={table}: {name!r} is not a dimension{suggest(name, DIMENSIONS)}")
    if len(names) != 2 or names[0] == names[1]:
        raise InputError(f"table={table} must be two dimensions, rows×columns, of {', '.join(DIMENSIONS)}")
    if len(fixed) < len(pairs) or {*names} & {*fixed} or not all(fixed.values()):
        raise InputError(f"table={table}: after @ comes another dimension, once, with its value: @merger:tsvm")
    if measure not in MEASURES:
        raise InputError(f"metric is {measure!r}{suggest(measure, MEASURES)}")
    return (names[0], names[1]), fixed


def _narrow(records: Sequence[Record], fixed: Mapping[str, str], table: str) -> list[Record]:
    kept = list(records)
    for name, value in fixed.items():
        known = _list_values(kept, name)
        if name == "merger":  # by its label, or as tables show it
            value = {display_name(label): label for label in known}.get(value, value)
        if value not in known:
            raise InputError(f"table={table}: no record has {name} {value!r}{suggest(value, known)}")
        kept = [record for record in kept if _read_value(record, name) == value]
    return kept


def _refuse_open(records: Sequence[Record], names: Sequence[str], table: str) -> None:
    for axis in (*AXES, "merger"):
        values = _list_values(records, axis)
        if axis not in names and len(values) > 1:
            raise InputError(
                f"table={table} leaves {axis} open, which has several values ({join_names(values)}): make it "
                f"one of the two, or fix it, table={table}@{axis}:VALUE"
            )


def _read_value(record: Record, name: str) -> str:
    return record.label if name == "merger" else str(getattr(record, name))


def _list_values(records: Sequence[Record], name: str) -> tuple[str, ...]:
    """In order of appearance; models in the order of a table: zero-shot, experts, mergers, joint."""
    ordered = sorted(records, key=lambda r: KINDS.index(r.kind)) if name == "merger" else records
    if name == "seed":
        ordered = sorted(records, key=lambda r: r.seed)
    return tuple(dict.fromkeys(_read_value(record, name) for record in ordered))
