"""One evaluation is one flat record; everything a report shows is a view of these records.

A file of records is JSON Lines: one object a line, every field present, no other field allowed.
"""

import json
import math
import unicodedata
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from pydantic import FiniteFloat

from mergekit_lab.errors import InputError, join_names, suggest
from mergekit_lab.paths import sync_to_disk

KINDS = ("zero_shot", "expert", "checkpoint", "merged", "joint")
"""What was evaluated, in the order a table shows it."""

_IDENTITY = (
    *("backbone", "suite", "finetuning", "optimizer", "kind", "merger", "model", "task", "part", "metric"),
    *("seed", "evaluation_key"),
)
_LABELS = {"zero_shot": "zero-shot", "expert": "experts", "joint": "+joint"}


@dataclass(frozen=True)
class Record:
    """One model evaluated on one task with one metric. Zero-shot, expert and joint records carry the
    backbone, finetuning and optimizer of the run they belong to, so that every group has its references.
    A checkpoint is evaluated on every task, under its own name.

    Raises `InputError` for an unknown kind, for a `merger` or a `model` that does not fit the kind, for a value
    above 1 (a percentage) or below -1, and for a coefficient or a time that is no finite number.
    """

    backbone: str
    suite: str
    finetuning: str
    optimizer: str
    kind: str
    """One of `KINDS`."""
    merger: str | None
    """Label of the merger; None unless `kind` is "merged"."""
    coefficient: float | None
    """Global coefficient α of the merged model, None where there is none."""
    task: str
    part: str
    metric: str
    value: float
    """In 0..1, more is better; a correlation may fall to -1."""
    expert_value: float | None
    """The task's expert with the same metric on the same part; where checkpoints were evaluated, the best."""
    zero_shot_value: float | None
    """The backbone with the same metric on the same part."""
    seed: int
    wall_seconds: float
    """The time of this evaluation; for a reused one, the time when it was computed."""
    peak_memory_bytes: int | None
    model_key: str
    """Store key of the evaluated weights."""
    evaluation_key: str
    """Store key of this evaluation."""
    reused: bool
    """True if the evaluation was found in the store instead of computed."""
    model_seconds: float | None = None
    """The time of making the evaluated model: an expert's training, or a merge with its search and the Fishers
    or Grams it read, but without its experts. None if it is unknown."""
    model_peak_memory_bytes: int | None = None
    """The peak of an accelerator's memory while the model was made."""
    reads_test_inputs: bool | None = None
    """Whether the model was made with inputs of test parts, though not with their labels."""
    weights: str | None = None
    """A hash of only the evaluated weights. Two experts with the same file have the same hash."""
    model: str | None = None
    """A checkpoint's name; None unless `kind` is "checkpoint"."""
    chosen: str | None = None
    """The settings of the merger that validation chose beside the coefficient, as `density=0.2`."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"record: unknown kind {self.kind!r}{suggest(self.kind, KINDS)}")
        if (self.kind == "merged") != (self.merger is not None):
            raise InputError(
                f"record: kind {self.kind!r} with merger {self.merger!r}: a merger's label "
                "belongs to kind 'merged', and only there"
            )
        if (self.kind == "checkpoint") != (self.model is not None):
            raise InputError(
                f"record: kind {self.kind!r} with model {self.model!r}: only checkpoints have a name"
            )
        for name in ("value", "expert_value", "zero_shot_value"):
            value = getattr(self, name)
            if value is not None and not -1.0 <= value <= 1.0:
                raise InputError(
                    f"record of task {self.task!r}: {name} is {value}; values are fractions (0..1), not percent"
                )
        for name, least in (("wall_seconds", 0.0), ("model_seconds", 0.0), ("coefficient", -math.inf)):
            number = getattr(self, name)
            if number is not None and not (math.isfinite(number) and number >= least):
                raise InputError(f"record of task {self.task!r}: {name} is {number}")

    @property
    def normalized(self) -> float | None:
        """`value / expert_value`: 1.0 is as good as the expert. None if the expert is unknown or ≤ 0."""
        return self.value / self.expert_value if self.expert_value and self.expert_value > 0 else None

    @property
    def label(self) -> str:
        """Row label: "zero-shot", "experts", the merger's label, the checkpoint's name, or "+joint"."""
        return self.merger or self.model or _LABELS[self.kind]

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two records exactly when they tell of the same evaluation in the same cell."""
        return tuple(getattr(self, name) for name in _IDENTITY)


@dataclass(frozen=True)
class Timing:
    """One stage of one run: wall-clock seconds, and how many of its artifacts were computed or reused."""

    seconds: FiniteFloat
    computed: int = 0
    reused: int = 0


@dataclass(frozen=True)
class Failure:
    """A run, or a part of one, that gave no result: its name, the error, the overrides that made it."""

    run: str
    error: str
    overrides: tuple[str, ...] = ()


def deduplicate(records: Iterable[Record]) -> list[Record]:
    """Each evaluation once, in order of first appearance.

    Several jobs of a sweep report the evaluations they share; the copy kept is the one that was
    computed rather than found in the store.
    """
    kept: dict[tuple[Any, ...], Record] = {}
    for record in records:
        if record.identity not in kept or (kept[record.identity].reused and not record.reused):
            kept[record.identity] = record
    return list(kept.values())


def write_text(path: Path, text: str) -> None:
    """Write `text` so that `path` holds all of it or what it held before, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{uuid.uuid4().hex}.{path.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        sync_to_disk(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write one JSON object a line, atomically."""
    lines = [json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) for record in records]
    write_text(path, "".join(line + "\n" for line in lines))


def read_records(path: Path) -> list[Record]:
    """Read what `write_records` wrote.

    Raises `InputError`, naming file and line, for a line that is not JSON, for a missing or unknown
    field, for a value of the wrong type or range; and for a file that cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_parse_record(json.loads(line)))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
    return records


def strip_controls(text: object) -> str:
    """The text without control characters other than the end of a line and tabs: terminals obey them."""
    return "".join(c for c in str(text) if c in "\n\t" or unicodedata.category(c) != "Cc")


_TYPES = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Record).items()}


_OPTIONAL = {field.name for field in fields(Record) if field.default is None}
"""Files of earlier versions lack them."""


def _parse_record(entry: object) -> Record:
    if not isinstance(entry, Mapping):
        raise InputError(f"a record is a JSON object, not {type(entry).__name__}")
    if "split" in entry and "part" not in entry:
        raise InputError("it has 'split' where records now have 'part': make the report of its run again")
    if unknown := set(entry) - set(_TYPES):
        near = suggest(min(unknown), _TYPES)
        raise InputError(f"unknown fields {join_names(unknown)}{near}")
    if missing := set(_TYPES) - set(entry) - _OPTIONAL:
        raise InputError(f"missing fields {join_names(missing)}")
    for name, value in entry.items():
        allowed = _TYPES[name]
        whole_number_as_float = float in allowed and type(value) is int
        if type(value) not in allowed and not whole_number_as_float:
            names = " or ".join("null" if kind is NoneType else kind.__name__ for kind in allowed)
            raise InputError(f"field {name!r} is {value!r}, not {names}")
        if isinstance(value, str) and value != strip_controls(value):
            raise InputError(f"field {name!r} is {value!r}, which holds control characters of a terminal")
    return Record(**entry)
