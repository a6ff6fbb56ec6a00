"""The tables of papers that ship with the package, and the settings that a run must have to be compared.

- `assets/published/SOURCE.csv` holds one source's tables. Lines that start with `#` say where they are from.
`row`
  is a merger's label, `experts`, `zero_shot` or a measure of experts (`training_seconds`). `column` is a task,
  `average` or `normalized` (in percent), or another measure that the report's stage knows. `when` lists
  settings that decide this number (`training.steps=2000 mergers.tsvm.rank=16`).
- `assets/published_tables.csv` lists settings that decide whole tables.
- `assets/protocols.csv` says which of these settings a paper prints, and which are our choice.
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
        experiments: patterns of their names, separated by blanks.
        when: `key=value …`. The line holds only for runs with these settings.
        key, value: the setting; the value `a|b` is either.
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
    """The tasks and settings that a run must have to be compared with a table's numbers.

    Without tasks, the rows name them. A value `a|b` is either. A key that ends with `?` matters only for runs
    that have it. Without an optimizer or a row, only settings of the whole table are returned.

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
    """The settings and those of `key=value …`, which replace the same keys and keys that contain them."""
    kept = dict(settings)
    for pair in when.split():
        key, _, value = pair.partition("=")
        name = key.removesuffix("?")
        kept = {k: v for k, v in kept.items() if not f"{name}.".startswith(f"{k.removesuffix('?')}.")}
        kept[key] = value
    return kept


@cache
def read_doubts(source: str) -> list[tuple[str, ...]]:
    """The lines `# Doubtful: TABLES | ROWS | COLUMNS | TEXT` of a source's header, each in four parts.

    The first three are patterns, separated by blanks. A row is `NAME` or `NAME@BACKBONE+FINETUNING+OPTIMIZER`.
    """
    lines = (_SOURCES / f"{source}.csv").read_text().splitlines()
    marked = [line.removeprefix("# Doubtful: ") for line in lines if line.startswith("# Doubtful: ")]
    return [tuple(part.strip() for part in line.split("|", 3)) for line in marked]


def find_doubt(source: str, row: Published) -> str:
    """What makes a published number doubtful; empty if nothing does."""
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
