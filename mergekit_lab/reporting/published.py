"""Published numbers next to ours: tables of papers, matched with a run's results.

A published number is compared with a run only if the run has all settings that decide the number.
`paper_tables` says which these are.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import mean

from mergekit_lab.reporting.names import display_name
from mergekit_lab.reporting.paper_tables import (
    Published,
    find_conditions,
    find_doubt,
    read_published,
    replace_settings,
)

log = logging.getLogger(__name__)

_NAMED_BY_ROWS = ("_target_", "optimizer_of")
_OF_EVERY_RUN = ("experts", "zero_shot", "training_seconds", "ks_distance", "mean_log_likelihood")


@dataclass(frozen=True)
class Protocol:
    """Which settings of its experiments the source of a table prints.

    Attributes:
        printed: keys of settings that are printed. A protocol without any keys means that all are.
        ours: settings that are not printed, by key: the run's `value`, or `value (why)`.
    """

    printed: frozenset[str] = frozenset()
    ours: Mapping[str, str] = field(default_factory=dict)

    def tell_apart(self, row: Published, settings: Mapping[str, str]) -> tuple[str, str]:
        """Two texts `key=value; …`: the printed settings, which the run has, and those that are not printed."""
        named = {pair.partition("=")[0] for pair in row.when.split()} | self.printed
        equal, ours = [], dict[str, str]()
        for key, text in self.ours.items():  # but other rows' methods and, for experts, the search
            group, _, rest = key.partition(".")
            other = group == "mergers" and rest.partition(".")[0] != row.row
            if not other and not (group == "search" and row.row in _OF_EVERY_RUN):
                ours[key] = text
        for name, value in settings.items():
            key = name.removesuffix("?")
            if key in named or key.rpartition(".")[2] in _NAMED_BY_ROWS or self == Protocol():
                equal.append(f"{key}={value}")
            else:
                ours.setdefault(key, value)
        return "; ".join(equal), "; ".join(f"{k}={text}" for k, text in ours.items() if k not in named)


@dataclass(frozen=True)
class Beside:
    """A published number and ours, both in the column's unit; `ours` is None if it was not measured."""

    source: str
    table: str
    setting: str
    row: str
    column: str
    published: float
    ours: float | None
    equal: str = ""
    """The settings that the source prints, which the run has too."""
    unprinted: str = ""
    """The run's settings that the source does not print."""
    note: str = ""
    """What makes the published number doubtful."""

    @property
    def difference(self) -> float | None:
        return None if self.ours is None else self.ours - self.published


def set_beside(
    name: str,
    measured: Callable[[str, str], float | None],
    axes: Mapping[str, str],
    holds: Callable[[str], bool],
    run_tasks: Iterable[str],
    protocol: Protocol | None = None,
) -> list[Beside]:
    """A table's numbers that can be compared with a run, with the run's own numbers.

    A number is left out if the run lacks a setting that decides it. The log says which.

    Args:
        name: of the table, as `read_published` takes it.
        measured: our value of a (row, column) in the column's unit, or None.
        axes: the run's backbone, finetuning and optimizer.
        holds: whether `key=value`, or `key?=value`, holds in this run.
        run_tasks: the run's tasks. Merged models and averages depend on all of a table's tasks, so they are
            left out if the run has others.
        protocol: which settings the table's source prints.
    """
    source, _, _ = name.partition(" ")
    tasks, _ = find_conditions(name)
    together = not tasks or tasks == set(run_tasks)
    if not together:
        log.info("published %s: merged models and averages are of other tasks than this run's", name)
    check = cache(holds)
    others: dict[str, dict[str, None]] = defaultdict(dict)
    rows = []
    for row in read_published(name):
        alone = row.row in _OF_EVERY_RUN and row.column not in ("average", "normalized")
        if any(value != getattr(row, axis) for axis, value in axes.items()) or not (together or alone):
            continue
        settings = replace_settings(find_conditions(name, row.optimizer, row.row)[1], row.when)
        other = [
            f"{key.removesuffix('?')}={value}"
            for key, value in settings.items()
            if not any(check(f"{key}={each}") for each in value.split("|"))
        ]
        if other:
            others[row.row][" ".join(other)] = None
            continue
        setting = " ".join([row.backbone, row.finetuning, row.optimizer, *row.when.split()])
        equal, unprinted = (protocol or Protocol()).tell_apart(row, settings)
        ours = measured(row.row, row.column)
        note = find_doubt(source, row)
        rows.append(
            Beside(source, row.table, setting, row.row, row.column, row.value, ours, equal, unprinted, note)
        )
    for of_row, reasons in others.items():
        log.info("published %s: %s is left out, its numbers are of %s", name, of_row, " or ".join(reasons))
    return rows


def unite(runs: Iterable[tuple[str, Iterable[Beside]]]) -> tuple[list[Beside], list[str]]:
    """Each published number once, and notes on those that are left out.

    Our number is the mean over the seeds of a configuration. A published number is left out if several
    configurations have its settings and measured it differently.

    Args:
        runs: the configuration of each, and its rows.
    """
    rows: dict[Beside, dict[str, list[float]]] = {}
    unprinted: dict[Beside, str] = {}
    for config, of_run in runs:
        lines = (line for line in config.splitlines() if not line.startswith(("seed:", "run_dir:")))
        but_seed = "\n".join(lines)
        for row in of_run:
            cell = replace(row, ours=None, unprinted="")
            measured = rows.setdefault(cell, {})
            if cell not in unprinted or (row.ours is not None and len(measured) == 0):
                unprinted[cell] = row.unprinted
            if row.ours is not None:
                measured.setdefault(but_seed, []).append(row.ours)
    united, ambiguous = [], []
    for row, measured in rows.items():
        means = sorted(mean(values) for values in measured.values())
        if means and not math.isclose(means[0], means[-1], abs_tol=1e-9):
            ambiguous.append(f"{row.source} {row.table}, {row.setting}: {row.row} {row.column}")
        else:
            united.append(replace(row, ours=means[0] if means else None, unprinted=unprinted[row]))
    notes = []
    if ambiguous:
        notes.append(
            "Left out, because runs that differ in what the published number does not name measured it "
            f"differently: {'; '.join(ambiguous)}."
        )
    seeds = max((len(values) for measured in rows.values() for values in measured.values()), default=1)
    if seeds > 1:
        notes.append(f"Ours are means over up to {seeds} seeds.")
    doubts = [f"{DOUBT} Doubtful, {row.source} {row.table}: {row.note}." for row in united if row.note]
    notes += dict.fromkeys(doubts)
    return united, notes


TITLE = "Published numbers and ours"
HEADER = ("source", "setting", "model", "column", "published", "ours", "difference")
DOUBT = "†"
"""Beside a published number that is doubtful."""


def format_numbers(rows: Sequence[Beside]) -> list[tuple[str, ...]]:
    """The texts below `HEADER`, one tuple per number."""
    return [
        (
            f"{row.source} {row.table}",
            row.setting,
            display_name(row.row),
            row.column,
            f"{row.published:.2f}" + (f" {DOUBT}" if row.note else ""),
            "–" if row.ours is None else f"{row.ours:.2f}",
            "–" if row.difference is None else f"{row.difference:+.2f}",
        )
        for row in rows
    ]


def list_bases(rows: Iterable[Beside]) -> list[dict[str, str]]:
    """For every row its `name`, the `equal` and `unprinted` settings, and a `note` with all doubts."""
    notes_by_row: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        name = f"{row.source} {row.table}, {row.setting}: {display_name(row.row)}"
        notes = notes_by_row.setdefault((name, row.equal, row.unprinted), [])
        if row.note and row.note not in notes:
            notes.append(row.note)
    return [
        {"name": name, "equal": equal, "unprinted": unprinted, "note": "; ".join(notes)}
        for (name, equal, unprinted), notes in notes_by_row.items()
    ]
