"""Tables: their cells and rows, and `Sheet`, the form in which `writing.py` gets every kind of table."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mergekit_lab.reporting.names import display_name

AXES = ("backbone", "suite", "finetuning", "optimizer")
"""What a group of rows has in common; an axis with one value is not shown."""

MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """Mean over seeds, in 0..1, and sample standard deviation (None for fewer than two seeds)."""

    mean: float | None = None
    sd: float | None = None
    best: bool = False
    """The best merger of its group in this column, at the precision shown."""
    second: bool = False
    """The second best, where there is a third."""
    plain: float | None = None
    """The value itself, beside one that is a share of an expert's."""

    @property
    def text(self) -> str:
        """Percent: "91.3", "91.3 ± 0.4", with the plain value "91.3 (78.2)"; "–" where there is none."""
        if self.mean is None:
            return MISSING
        spread = f" ± {to_percent(self.sd)}" if self.sd is not None else ""
        return (
            to_percent(self.mean) + spread + (f" ({to_percent(self.plain)})" if self.plain is not None else "")
        )


@dataclass(frozen=True)
class Line:
    """One line of a sheet. A reference cannot be marked as the best."""

    names: tuple[str, ...]
    cells: tuple[Cell, ...]
    texts: tuple[str, ...] = ()
    reference: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table as it is written: columns of names, of cells, and of texts behind them.

    Attributes:
        names, columns, texts: headings of each.
        groups: lines that belong together.
        notes: what a reader must know, one sentence each.
        narrow: positions of columns in the order in which they stand where not all have room.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    texts: tuple[str, ...]
    groups: tuple[tuple[Line, ...], ...]
    notes: tuple[str, ...]
    narrow: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One model (over all seeds). `cells` follow the table's `columns`."""

    group: tuple[str, ...]
    label: str
    kind: str
    cells: tuple[Cell, ...]
    coefficients: tuple[float, ...]
    """The distinct coefficients chosen, ascending; several if the seeds disagree."""
    seeds: tuple[int, ...]
    evaluations: tuple[tuple[int, str, str], ...] = ()
    """Seed, task and evaluation key of what the row is made of."""
    conflicts: tuple[tuple[str, int], ...] = ()
    """Task and seed of other evaluations, which differ from those in something that no axis names."""
    interval: tuple[float, float] | None = None
    """Of the average, 95 %; see `bootstrap.add_intervals`."""
    seconds: float | None = None
    """What making a merged or the joint model took, its experts' training included; mean over seeds."""
    peak_bytes: int | None = None
    """The largest peak on an accelerator while it was made."""
    reads_test_inputs: bool = False
    """Made with inputs of test parts, without their labels."""
    chosen: tuple[str, ...] = ()
    """The distinct settings that validation chose beside the coefficient."""
    close: bool = False
    """A merger that is not distinguishable from the best average of its group."""

    @property
    def name(self) -> str:
        """The label as readers know it."""
        return display_name(self.label)

    @property
    def average(self) -> Cell:
        return self.cells[-2]

    @property
    def normalized(self) -> Cell:
        return self.cells[-1]

    def compute_error_bar(self, measure: str) -> tuple[float, float] | None:
        """The average's 95 % interval, else one deviation to each side; None if neither is known."""
        if measure == "average" and self.interval is not None:
            return self.interval
        cell = self.average if measure == "average" else self.normalized
        if cell.mean is None or cell.sd is None:
            return None
        return cell.mean - cell.sd, cell.mean + cell.sd

    @property
    def coefficient(self) -> str:
        return (
            "–".join(f"{value:g}" for value in sorted({*self.coefficients[:1], *self.coefficients[-1:]}))
            or MISSING
        )


@dataclass(frozen=True)
class Table:
    """Rows zero-shot, experts, every merger, +joint, for each group; columns the tasks and two means."""

    axes: tuple[str, ...]
    """Names of the entries of `Row.group`."""
    tasks: tuple[str, ...]
    rows: tuple[Row, ...]
    part: str
    notes: tuple[str, ...]
    """What a reader must know to read the numbers, one sentence each."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.tasks, "average", "normalized")

    @property
    def mergers(self) -> tuple[str, ...]:
        """Labels of the merged rows, in order of first appearance: the order and color of every view."""
        return tuple(dict.fromkeys(row.label for row in self.rows if row.kind == "merged"))

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return tuple(dict.fromkeys(row.group for row in self.rows))

    def make_sheet(self, name: Callable[[str], str] = display_name) -> Sheet:
        """The table to write; `name` returns a label's display name."""
        readers = any(row.reads_test_inputs for row in self.rows)
        compared = find_competing_kind(self.rows)

        def format_row(row: Row) -> tuple[str, ...]:
            reads = "test inputs" if row.reads_test_inputs else MISSING
            return (row.coefficient, reads) if readers else (row.coefficient,)

        groups = tuple(
            tuple(
                Line((*row.group, name(row.label)), row.cells, format_row(row), row.kind != compared)
                for row in self.rows
                if row.group == group
            )
            for group in self.groups
        )
        means = len(self.tasks)
        narrow = (means, means + 1, *range(means))
        headings = ("coefficient", "reads") if readers else ("coefficient",)
        return Sheet((*self.axes, "model"), self.columns, headings, groups, self.notes, narrow)

    def as_rows(self) -> list[dict[str, Any]]:
        """The rows as flat dicts of names and numbers (0..1): for files and trackers."""
        flat = []
        for row in self.rows:
            entry: dict[str, Any] = dict(zip(self.axes, row.group, strict=True)) | {"model": row.label}
            for column, cell in zip(self.columns, row.cells, strict=True):
                entry |= {column: cell.mean, f"{column} sd": cell.sd}
            flat.append(entry | {"coefficient": row.coefficient, "reads test inputs": row.reads_test_inputs})
        return flat


def find_competing_kind(rows: Iterable[Row]) -> str:
    """The kind of rows that compete for the best: merged models, or checkpoints if nothing was merged."""
    return "merged" if any(row.kind == "merged" for row in rows) else "checkpoint"


def to_percent(value: float) -> str:
    """ "91.3" of 0.913."""
    return f"{100 * value:.1f}"
