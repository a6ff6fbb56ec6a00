"""Tables of papers, as data of the package.

A file in `assets/published` holds one source's tables as rows of CSV below lines that start with `#` and say
where they are from. `row` is a merger's label, `experts`, `zero_shot` or a measure of experts
(`training_seconds`); `column` is a task, `average` or `normalized` (in percent), or another measure that the
stage of the report knows. `when` says what decides the number (`training.steps=2000 mergers.tsvm.rank=16`), and
`assets/published_tables.csv` what decides those of whole tables. `assets/protocols.csv` says what of that a
paper prints, and what is ours.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from mergekit_lab.errors import InputError, suggest

_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_SOURCES = _ASSETS / "published"
_TABLES = _ASSETS / "published_tables.csv"


@cache
def _read_rows(file: Path) -> list[dict[str, str]]:
    lines = file.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if line and not line.startswith("#")))


@dataclass(frozen=True)
class Published:
    """One number of one table."""

    table: str
    when: str
    backbone: str
    finetuning: str
    optimizer: str
    row: str
    column: str
    value: float


@dataclass(frozen=True)
class ProtocolLine:
    """One setting of a paper's experiments.

    Attributes:
        experiments: patterns of their names, by blanks.
        when: `key=value …` of a run that it is asked of.
        key, value: `a|b` is either.
        source: where it is printed, or `ours: why`.
    """

    experiments: str
    when: str
    key: str
    value: str
    source: str

    def is_of(self, experiment: str) -> bool:
        return any(fnmatch(experiment, pattern) for pattern in self.experiments.split())

    @property
    def is_ours(self) -> bool:
        return self.source.startswith("ours")


@cache
def read_protocols() -> list[ProtocolLine]:
    """The shipped table of protocols."""
    return [ProtocolLine(**row) for row in _read_rows(_ASSETS / "protocols.csv")]


def read_published(name: str) -> list[Published]:
    """A table, `<source> <table>` such as `saft C3`.

    Raises:
        InputError: there is no such source or table.
    """
    source, _, table = name.partition(" ")
    known = sorted(path.stem for path in _SOURCES.glob("*.csv"))
    if source not in known:
        raise InputError(f"published: there is no source {source!r}{suggest(source, known)}")
    rows = _read_rows(_SOURCES / f"{source}.csv")
    tables = {row["table"] for row in rows}
    if table not in tables:
        raise InputError(f"published: {source} has no table {table!r}{suggest(table, tables)}")
    return [
        Published(**{**row, "value": float(row["value"])})  # type: ignore[arg-type]
        for row in rows
        if row["table"] == table
    ]


@cache
def find_conditions(name: str, optimizer: str = "", row: str = "") -> tuple[frozenset[str], dict[str, str]]:
    """What a run must be to stand beside a table's numbers of an optimizer and a row.

    Its tasks (none: the rows name them), and values by key: `a|b` is either, and a key with a `?` at its end is
    asked only of runs that have it. The whole table's are those that narrow nothing.

    Raises:
        InputError: the table has no tasks in the file of conditions.
    """
    source, _, table = name.partition(" ")
    tasks: frozenset[str] | None = None
    settings: dict[str, str] = {}
    for line in _read_rows(_TABLES):
        own = line["source"] == source
        if not (own or line["source"] == "*") or not {table, "*"} & {*line["tables"].split(";")}:
            continue
        if line["optimizer"] in ("", optimizer) and line["row"] in ("", row):
            settings = replace_settings(settings, line["when"])
            if own and not line["optimizer"] and not line["row"]:
                tasks = frozenset(filter(None, line["tasks"].split("+"))) or tasks or frozenset()
    if tasks is None:
        raise InputError(f"published: {name} has no conditions in {_TABLES.name}")
    return tasks, settings


def replace_settings(settings: Mapping[str, str], when: str) -> dict[str, str]:
    """The settings with those of `key=value …`, which replace the same key and the keys it is inside of."""
    kept = dict(settings)
    for pair in when.split():
        key, _, value = pair.partition("=")
        name = key.removesuffix("?")
        kept = {k: v for k, v in kept.items() if not f"{name}.".startswith(f"{k.removesuffix('?')}.")}
        kept[key] = value
    return kept


@cache
def read_doubts(source: str) -> list[tuple[str, ...]]:
    """Tables, rows, columns and text of the lines `# Doubtful: …` of a source's header; patterns, by blanks.

    A row is its name, or `NAME@BACKBONE+FINETUNING+OPTIMIZER`.
    """
    lines = (_SOURCES / f"{source}.csv").read_text().splitlines()
    marked = [line.removeprefix("# Doubtful: ") for line in lines if line.startswith("# Doubtful: ")]
    return [tuple(part.strip() for part in line.split("|", 3)) for line in marked]


def find_doubt(source: str, row: Published) -> str:
    """What makes a published number doubtful; empty where nothing is known to."""
    where = f"{row.row}@{row.backbone}+{row.finetuning}+{row.optimizer}"
    cells = ((row.table,), (row.row, where), (row.column,))
    return "; ".join(
        text
        for *patterns, text in read_doubts(source)
        if all(
            any(fnmatch(name, each) for name in names for each in pattern.split())
            for names, pattern in zip(cells, patterns, strict=True)
        )
    )
