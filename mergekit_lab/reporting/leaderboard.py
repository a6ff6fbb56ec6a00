"""The leaderboard: models × tasks, from records.

A cell averages only over seeds, and a mean over tasks is shown only if every task of the group was evaluated.
So two numbers in one column always mean the same thing.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from mergekit_lab.reporting.records import KINDS, Record, deduplicate
from mergekit_lab.reporting.tables import AXES, Cell, Row, Table, find_competing_kind, to_percent

_MERGED_FROM = ("expert", "checkpoint")


def select_part(records: Iterable[Record]) -> tuple[str, list[Record]]:
    """The part that tables show, and its evaluations, each once: "test", or else the first record's part."""
    everything = deduplicate(records)
    part = "test" if any(r.part == "test" for r in everything) or not everything else everything[0].part
    return part, [record for record in everything if record.part == part]


def build_table(records: Iterable[Record], *, like: Table | None = None) -> Table:
    """The table of one part. A task with several metrics is shown by the first that the records have.

    `like` is a larger table, whose axes and tasks are taken, so that both have the same columns.
    """
    part, of_part = select_part(records)
    shown = keep_first_metric(of_part)
    metric = {record.task: record.metric for record in shown}

    axes = tuple(axis for axis in AXES if len({getattr(record, axis) for record in shown}) > 1)
    axes = axes if like is None else like.axes
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in shown:
        groups[tuple(getattr(record, axis) for axis in AXES)].append(record)
    tasks = tuple(metric) if like is None else like.tasks
    rows: list[Row] = []
    for members in groups.values():
        group = tuple(getattr(members[0], axis) for axis in axes)
        by_row: dict[tuple[int, str], list[Record]] = defaultdict(list)
        for record in distinguish_mergers(members):
            by_row[KINDS.index(record.kind), record.label].append(record)
        ordered = sorted(by_row.items(), key=lambda item: item[0][0])
        rows += _mark_rows([_make_row(group, of_row, members, tasks) for _, of_row in ordered])
    notes = _write_notes(part, rows, metric, sorted({record.metric for record in of_part}))
    return Table(axes, tasks, tuple(rows), part, tuple(notes))


def keep_first_metric(records: Iterable[Record]) -> list[Record]:
    """The records without those of a task's second and further metrics, in the order of appearance."""
    metric: dict[str, str] = {}
    return [record for record in records if metric.setdefault(record.task, record.metric) == record.metric]


def summarize(records: Iterable[Record], tasks: Collection[str], measure: str = "value") -> Cell:
    """The mean over tasks, then mean and deviation over the seeds that have the measure of every task.

    The first record of a task and seed counts. `measure` is an attribute of `Record`.
    """
    by_seed: dict[int, dict[str, float | None]] = defaultdict(dict)
    for record in records:
        by_seed[record.seed].setdefault(record.task, getattr(record, measure))
    means = []
    for values in by_seed.values():
        known = [value for task, value in values.items() if task in tasks and value is not None]
        if known and len(known) == len(tasks):
            means.append(mean(known))
    return Cell(mean(means), stdev(means) if len(means) > 1 else None) if means else Cell()


def _sum_costs(of_row: Sequence[Record], members: Sequence[Record]) -> dict[str, Any]:
    """`seconds` and `peak_bytes` of a row. The seconds of a merged model include its experts'."""
    kind = of_row[0].kind
    if kind not in ("merged", "joint"):
        return {}
    seconds: list[float] = []
    for seed, own in {record.seed: record.model_seconds for record in of_row}.items():
        trained = {r.model_key: r.model_seconds for r in members if r.kind in _MERGED_FROM and r.seed == seed}
        parts = [own, *(trained.values() if kind == "merged" else ())]
        seconds.append(sum(math.nan if part is None else part for part in parts))
    peaks = [r.model_peak_memory_bytes for r in of_row if r.model_peak_memory_bytes is not None]
    return {
        "seconds": None if math.isnan(sum(seconds)) else mean(seconds),
        "peak_bytes": max(peaks, default=None),
    }


def distinguish_mergers(records: Sequence[Record]) -> list[Record]:
    """The records, with new labels for mergers that ran several times in one group with one label and seed.

    The new labels contain the coefficients if these differ, else the models' keys.
    """
    runs: dict[tuple[str, tuple[Any, ...]], dict[str, float | None]] = defaultdict(dict)
    for record in records:
        if record.kind == "merged":
            where = tuple(getattr(record, axis) for axis in (*AXES, "seed"))
            runs[record.label, where][record.model_key] = record.coefficient
    ambiguous = {label for (label, _), models in runs.items() if len(models) > 1}
    by_key = {label for (label, _), models in runs.items() if len(set(models.values())) < len(models)}

    def rename(record: Record) -> Record:
        label, coefficient = record.label, record.coefficient
        if record.kind != "merged" or label not in ambiguous:
            return record
        keyed = label in by_key or coefficient is None
        return replace(record, merger=f"{label} ({record.model_key[:8] if keyed else f'α={coefficient:g}'})")

    return [rename(record) for record in records]


def _make_row(
    group: tuple[str, ...], of_row: Sequence[Record], members: Sequence[Record], tasks: tuple[str, ...]
) -> Row:
    needed = {record.task for record in members}
    cells: dict[str, dict[int, Record]] = {task: {} for task in tasks}
    others = [r for r in of_row if cells[r.task].setdefault(r.seed, r) is not r]
    return Row(
        group,
        of_row[0].label,
        of_row[0].kind,
        cells=(
            *(summarize(of_task.values(), [task]) for task, of_task in cells.items()),
            summarize(of_row, needed),
            summarize(of_row, needed, "normalized"),
        ),
        reads_test_inputs=any(record.reads_test_inputs for record in of_row),
        chosen=tuple(sorted({record.chosen for record in of_row if record.chosen})),
        coefficients=tuple(sorted({r.coefficient for r in of_row if r.coefficient is not None})),
        seeds=tuple(sorted({record.seed for record in of_row})),
        evaluations=tuple(
            (seed, task, record.evaluation_key)
            for task, of_task in cells.items()
            for seed, record in of_task.items()
        ),
        conflicts=tuple((record.task, record.seed) for record in others),
        **_sum_costs(of_row, members),
    )


def _mark_rows(rows: Sequence[Row]) -> list[Row]:
    kind = find_competing_kind(rows)
    compared = [row for row in rows if row.kind == kind]
    if len(compared) < 2:
        return list(rows)
    columns = [mark_best(column) for column in zip(*(row.cells for row in compared), strict=True)]
    lines = iter(zip(*columns, strict=True))
    return [replace(row, cells=next(lines)) if row.kind == kind else row for row in rows]


def mark_best(column: Sequence[Cell]) -> list[Cell]:
    """Mark the best at the precision shown, and the second if there are three different values or more."""
    shown = [None if cell.mean is None else round(cell.mean, 3) for cell in column]
    ranks = sorted({value for value in shown if value is not None}, reverse=True)
    second = ranks[1] if len(ranks) > 2 else None
    return [
        cell if value is None else replace(cell, best=value == ranks[0], second=value == second)
        for cell, value in zip(column, shown, strict=True)
    ]


def _write_notes(part: str, rows: Sequence[Row], metric: dict[str, str], met: Sequence[str]) -> list[str]:
    if not rows:
        return ["No evaluation was recorded."]
    seeds = sorted({seed for row in rows for seed in row.seeds})
    over = f"; mean ± standard deviation over seeds {_join_numbers(seeds)}" if len(seeds) > 1 else ""
    of = "the best checkpoint" if any(row.kind == "checkpoint" for row in rows) else "the task's expert"
    notes = [
        f"Percent on the {part} part{over}.",
        f"Normalized: the mean over tasks of value ÷ {of} on the same part.",
    ]
    if any(row.kind == "joint" for row in rows):
        notes.append("+joint is trained on all tasks at once: the upper reference.")
    if any(cell.best for row in rows for cell in row.cells):
        best = {"merged": "merger"}.get(find_competing_kind(rows), "checkpoint")
        notes.append(f"Bold: the best {best} of its group in that column.")
    if any(row.reads_test_inputs for row in rows):
        notes.append(
            "Reads test inputs: learned from the test part's inputs, without their labels; others are not."
        )
    if len(met) > 1:
        of_tasks = ", ".join(f"{task} {name}" for task, name in metric.items())
        others = sorted(set(met) - set(metric.values()))
        notes.append(
            f"Metrics: {of_tasks}." + (f" Recorded but not shown: {', '.join(others)}." if others else "")
        )
    notes += [
        f"{' / '.join((*row.group, row.name))}: validation chose {chosen}."
        for row in rows
        for chosen in row.chosen
    ]
    notes += note_strengths([row.average.mean for row in rows if row.kind == "expert"])
    notes += [
        f"{' / '.join((*row.group, row.name))} has only seeds {_join_numbers(row.seeds)}."
        for row in rows
        if list(row.seeds) != seeds
    ]
    notes += [
        f"{' / '.join((*row.group, row.name))}, {task}, seed {seed}: several evaluations differ in something "
        "no axis names; the first is shown."
        for row in rows
        for task, seed in row.conflicts
    ]
    return notes


def _join_numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def note_strengths(averages: Iterable[float | None]) -> list[str]:
    """A warning to the reader if the experts of several groups differ by one percentage point or more."""
    known = sorted(average for average in averages if average is not None)
    if not known or known[-1] - known[0] < 0.01:
        return []
    return [
        f"Experts differ in strength, from {to_percent(known[0])} to {to_percent(known[-1])} on average: "
        "normalized values flatter the weaker ones, so compare the values themselves too."
    ]
