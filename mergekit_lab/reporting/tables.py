"""The comparison table: one structure, several renderers.

Values are never averaged over anything but seeds, and a mean over tasks is shown only where every task
of the group was evaluated, so that two numbers in one column always mean the same thing.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from mergekit_lab.errors import InputError, suggestion
from mergekit_lab.reporting.records import KINDS, Record, deduplicate

if TYPE_CHECKING:
    from rich.console import Console

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

    @property
    def text(self) -> str:
        """Percent with one decimal: "91.3", "91.3 ± 0.4", or "–" where there is no value."""
        if self.mean is None:
            return MISSING
        return _percent(self.mean) + (f" ± {_percent(self.sd)}" if self.sd is not None else "")


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
    interval: tuple[float, float] | None = None
    """Of the average, 95 %; see `bootstrap.with_intervals`."""
    seconds: float | None = None
    """What making a merged or the joint model took, its experts' training included; mean over seeds."""
    peak_bytes: int | None = None
    """The largest peak on an accelerator while it was made."""
    close: bool = False
    """A merger that is not distinguishable from the best average of its group."""

    @property
    def average(self) -> Cell:
        return self.cells[-2]

    @property
    def normalized(self) -> Cell:
        return self.cells[-1]

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
    split: str
    notes: tuple[str, ...]
    """What a reader must know to read the numbers, one sentence each."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.tasks, "average", "normalized")

    @property
    def header(self) -> tuple[str, ...]:
        return (*self.axes, "model", *self.columns, "coefficient")

    @property
    def mergers(self) -> tuple[str, ...]:
        """Labels of the merged rows, in order of first appearance: the order and color of every view."""
        return tuple(dict.fromkeys(row.label for row in self.rows if row.kind == "merged"))

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return tuple(dict.fromkeys(row.group for row in self.rows))

    def as_rows(self) -> list[dict[str, Any]]:
        """The rows as flat dicts of names and numbers (0..1): for files and trackers."""
        flat = []
        for row in self.rows:
            entry: dict[str, Any] = dict(zip(self.axes, row.group, strict=True))
            entry["model"] = row.label
            for column, cell in zip(self.columns, row.cells, strict=True):
                entry[column] = cell.mean
                entry[f"{column} sd"] = cell.sd
            entry["coefficient"] = row.coefficient
            flat.append(entry)
        return flat


def comparison_table(
    records: Iterable[Record], split: str | None = None, *, like: Table | None = None
) -> Table:
    """Build the table of one split ("test" if there is one, else the first met).

    `like` gives axes and tasks of a larger table, so that the rows of both have the same columns. Of a task
    with several metrics the first met counts. Raises `InputError` if no record has `split`.
    """
    everything = deduplicate(records)
    splits = list(dict.fromkeys(record.split for record in everything))
    if split is not None and split not in splits:
        raise InputError(f"no record of split {split!r}{suggestion(split, splits)}")
    split = split or ("test" if "test" in splits or not splits else splits[0])
    of_split = [record for record in everything if record.split == split]
    metric: dict[str, str] = {}
    for record in of_split:
        metric.setdefault(record.task, record.metric)
    shown = [record for record in of_split if record.metric == metric[record.task]]

    axes = tuple(axis for axis in AXES if len({getattr(record, axis) for record in shown}) > 1)
    axes = axes if like is None else like.axes
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in shown:
        groups[tuple(getattr(record, axis) for axis in AXES)].append(record)
    tasks = tuple(metric) if like is None else like.tasks
    rows: list[Row] = []
    conflicts: list[str] = []
    for members in groups.values():
        group = tuple(getattr(members[0], axis) for axis in axes)
        rows += _group_rows(group, members, tasks, conflicts)
    notes = (*_notes(split, rows, metric, sorted({record.metric for record in of_split})), *conflicts)
    return Table(axes, tasks, tuple(rows), split, notes)


def _group_rows(
    group: tuple[str, ...], members: Sequence[Record], tasks: tuple[str, ...], conflicts: list[str]
) -> list[Row]:
    names = distinct_labels(members)
    by_row: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for record in members:
        label = names.get((record.label, record.model_key), record.label)
        by_row[KINDS.index(record.kind), label].append(record)
    needed = {record.task for record in members}
    rows = []
    for (kind, label), of_row in sorted(by_row.items(), key=lambda item: item[0][0]):
        row = _row(group, KINDS[kind], label, of_row, tasks, needed, conflicts)
        rows.append(replace(row, **_costs(row.kind, of_row, members)))
    return _mark_best(rows)


def _costs(kind: str, of_row: Sequence[Record], members: Sequence[Record]) -> dict[str, Any]:
    """`seconds` and `peak_bytes` of a row; a merged model costs its experts too."""
    if kind not in ("merged", "joint"):
        return {}
    peaks = [r.model_peak_memory_bytes for r in of_row if r.model_peak_memory_bytes is not None]
    own = {record.seed: record.model_seconds for record in of_row}
    seconds: list[float | None] = []
    for seed, of_seed in own.items():
        trained = {r.model_key: r.model_seconds for r in members if r.kind == "expert" and r.seed == seed}
        parts = [of_seed, *(trained.values() if kind == "merged" else ())]
        known = [part for part in parts if part is not None]
        seconds.append(sum(known) if len(known) == len(parts) else None)
    whole = [each for each in seconds if each is not None]
    return {
        "seconds": mean(whole) if whole and len(whole) == len(seconds) else None,
        "peak_bytes": max(peaks, default=None),
    }


def distinct_labels(records: Iterable[Record]) -> dict[tuple[str, str], str]:
    """Labels by (label, model key) for mergers that ran more than once in one group under one label and seed.

    They are told apart by their coefficients if these differ, else by the model's key.
    """
    runs: dict[tuple[str, tuple[Any, ...]], dict[str, float | None]] = defaultdict(dict)
    for record in records:
        if record.kind == "merged":
            place = tuple(getattr(record, axis) for axis in (*AXES, "seed"))
            runs[record.label, place][record.model_key] = record.coefficient
    ambiguous = {label for (label, _), models in runs.items() if len(models) > 1}
    by_key = {label for (label, _), models in runs.items() if len(set(models.values())) < len(models)}
    return {
        (label, key): f"{label} ({key[:8]})"
        if label in by_key or coefficient is None
        else f"{label} (α={coefficient:g})"
        for (label, _), models in runs.items()
        if label in ambiguous
        for key, coefficient in models.items()
    }


def _row(
    group: tuple[str, ...],
    kind: str,
    label: str,
    of_row: Sequence[Record],
    tasks: tuple[str, ...],
    needed: set[str],
    conflicts: list[str],
) -> Row:
    cells: dict[str, dict[int, Record]] = {task: {} for task in tasks}
    conflicts += [
        f"{' / '.join((*group, label))}, {record.task}, seed {record.seed}: several evaluations "
        "differ in something no axis names; the first is shown."
        for record in of_row
        if cells[record.task].setdefault(record.seed, record) is not record
    ]
    seeds = sorted({record.seed for record in of_row})
    complete = [
        [cells[task][seed] for task in tasks if task in needed]
        for seed in seeds
        if all(seed in cells[task] for task in needed)
    ]
    ratios = [[record.normalized for record in members] for members in complete]
    return Row(
        group,
        label,
        kind,
        cells=(
            *(_cell([record.value for record in of_task.values()]) for of_task in cells.values()),
            _cell([mean(record.value for record in members) for members in complete]),
            _cell(
                [
                    mean(known)
                    for members in ratios
                    if len(known := [ratio for ratio in members if ratio is not None]) == len(members)
                ]
            ),
        ),
        coefficients=tuple(sorted({r.coefficient for r in of_row if r.coefficient is not None})),
        seeds=tuple(seeds),
        evaluations=tuple(
            (seed, task, record.evaluation_key)
            for task, of_task in cells.items()
            for seed, record in of_task.items()
        ),
    )


def _cell(values: Sequence[float]) -> Cell:
    if not values:
        return Cell()
    return Cell(mean(values), stdev(values) if len(values) > 1 else None)


def _mark_best(rows: Sequence[Row]) -> list[Row]:
    merged = [row for row in rows if row.kind == "merged"]
    if len(merged) < 2:
        return list(rows)
    columns = [marked(column) for column in zip(*(row.cells for row in merged), strict=True)]
    lines = iter(zip(*columns, strict=True))
    return [replace(row, cells=next(lines)) if row.kind == "merged" else row for row in rows]


def marked(column: Sequence[Cell]) -> list[Cell]:
    """The best and, of three different values or more, the second, at the precision shown."""
    shown = [None if cell.mean is None else round(cell.mean, 3) for cell in column]
    ranks = sorted({value for value in shown if value is not None}, reverse=True)
    second = ranks[1] if len(ranks) > 2 else None
    return [
        cell if value is None else replace(cell, best=value == ranks[0], second=value == second)
        for cell, value in zip(column, shown, strict=True)
    ]


def _notes(split: str, rows: Sequence[Row], metric: dict[str, str], met: Sequence[str]) -> list[str]:
    if not rows:
        return ["No evaluation was recorded."]
    seeds = sorted({seed for row in rows for seed in row.seeds})
    over = f"; mean ± standard deviation over seeds {_numbers(seeds)}" if len(seeds) > 1 else ""
    notes = [
        f"Percent on the {split} split{over}.",
        "Normalized: the mean over tasks of value ÷ the task's expert on the same split.",
    ]
    if any(row.kind == "joint" for row in rows):
        notes.append("+joint is trained on all tasks at once: the upper reference.")
    if any(cell.best for row in rows for cell in row.cells):
        notes.append("Bold: the best merger of its group in that column.")
    if len(met) > 1:
        of_tasks = ", ".join(f"{task} {name}" for task, name in metric.items())
        others = sorted(set(met) - set(metric.values()))
        notes.append(
            f"Metrics: {of_tasks}." + (f" Recorded but not shown: {', '.join(others)}." if others else "")
        )
    notes += [
        f"{' / '.join((*row.group, row.label))} has only seeds {_numbers(row.seeds)}."
        for row in rows
        if list(row.seeds) != seeds
    ]
    return notes


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def print_table(table: Table, console: "Console | None" = None) -> None:
    """Print with rich; where the terminal is too narrow for every task, only the means are shown."""
    from rich.console import Console

    console = console or Console()
    full = _rich_table(table, table.columns)
    unlimited = console.options.update(max_width=sys.maxsize)
    narrow = console.measure(full, options=unlimited).maximum > console.width
    console.print(_rich_table(table, table.columns[-2:]) if narrow else full)
    notes = [*table.notes, *(["The terminal is too narrow for the tasks' columns."] if narrow else [])]
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False)


def _rich_table(table: Table, columns: Sequence[str]) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(header_style="bold")
    for name in (*table.axes, "model"):
        drawn.add_column(Text(name), no_wrap=True)
    for name in (*columns, "coefficient"):
        drawn.add_column(Text(name), justify="right", no_wrap=True)
    for row, following in zip(table.rows, (*table.rows[1:], None), strict=False):
        cells = row.cells[-len(columns) :]
        drawn.add_row(
            *map(Text, (*row.group, row.label)),
            *(Text(cell.text, style="bold green" if cell.best else "") for cell in cells),
            Text(row.coefficient),
            end_section=following is None or following.group != row.group,
            style="" if row.kind == "merged" else "dim",
        )
    return drawn


def to_markdown(table: Table) -> str:
    """A GitHub-flavored table and its notes; the best merger of a column is bold."""
    names = len(table.axes) + 1
    lines = [
        markdown_line(map(markdown_text, table.header)),
        markdown_line(["---"] * names + ["---:"] * (len(table.header) - names)),
    ]
    for row in table.rows:
        cells = [f"**{cell.text}**" if cell.best else cell.text for cell in row.cells]
        lines.append(markdown_line([*map(markdown_text, (*row.group, row.label)), *cells, row.coefficient]))
    return "\n".join([*lines, "", *(f"- {markdown_text(note)}" for note in table.notes)]) + "\n"


def markdown_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown_text(text: str) -> str:
    for character, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("\n", " ")):
        text = text.replace(character, safe)
    return text
