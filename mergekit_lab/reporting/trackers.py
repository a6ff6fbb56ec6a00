"""Trackers, to which a run reports its progress. A stage sees only `Tracker`; which one it is, the config
decides.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from mergekit_lab.errors import InputError
from mergekit_lab.paths import is_stream
from mergekit_lab.reporting.records import Record, write_text
from mergekit_lab.reporting.tables import Table
from mergekit_lab.reporting.writing import quote_formula

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Product:
    """An artifact of the store, for trackers that record what was made from what.

    Attributes:
        name: as a person reads it, `expert-digits-adamw-s0`; products of other settings may have the same.
        key: tells those apart.
        kind: what it is.
        folder: its files, `manifest.json` among them.
        inputs: references of the products that it was made of.
        description: a sentence.
        metadata: names, settings and measured numbers.
    """

    name: str
    key: str
    kind: str
    folder: Path
    inputs: tuple[str, ...] = ()
    description: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """`NAME:KEY`."""
        return f"{self.name}:{self.key}"


@dataclass(frozen=True)
class Start:
    """What a tracker learns about a run when it begins.

    Attributes:
        config: the composed one, plain types; `choices` in it are the options taken, by group.
        folder: where the run keeps its files.
        identity: equal for two runs of which the second goes on where the first was cut.
        tags: what to find the run by among many.
    """

    config: Mapping[str, Any]
    folder: Path
    name: str
    group: str | None = None
    job_type: str | None = None
    identity: str | None = None
    tags: Sequence[str] = ()


def guard(log: Callable[..., None]) -> Callable[..., None]:
    """Make a tracker's method do nothing if no run is open, and warn if it fails."""

    @wraps(log)
    def log_if_open(self: Tracker, *args: Any, **kwargs: Any) -> None:
        if self._open is not None:
            with self._warn_of_failures(log.__name__):
                log(self, *args, **kwargs)

    return log_if_open


class Tracker:
    """Tracks nothing: the base of the others, and what a run without a logger uses.

    `start` comes first and `finish` last, also after an error; a tracker may be started again afterwards. No
    tracker makes a run fail: the first thing that goes wrong is a logged warning, later ones are silent.
    """

    name = "no logger"
    """As a warning calls it."""
    _open: Any = None
    """What a tracker writes to between `start` and `finish`."""
    _warned = False

    @contextmanager
    def _warn_of_failures(self, what: str) -> Iterator[None]:
        """Turn errors of everything after the construction into warnings."""
        try:
            yield
        except Exception as error:
            self._warn(f"{what} failed: {type(error).__name__}: {error}")

    def _warn(self, message: str) -> None:
        if not self._warned:
            _LOG.warning("%s: %s", self.name, message)
        self._warned = True

    def start(self, start: Start) -> None:
        """Begin a run."""
        self._open = None
        with self._warn_of_failures("start"):
            self._open = self._begin(start)

    def _begin(self, start: Start) -> Any:
        """What the tracker writes this run to; it may fail."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of one step. Names may change between calls; steps need not ascend."""

    def log_summary(self, table: Table) -> None:
        """The final comparison."""

    def log_records(self, records: Sequence[Record]) -> None:
        """All evaluations of the run."""

    def log_figure(self, name: str, path: Path | str) -> None:
        """A PNG file, already written."""

    def log_product(self, product: Product) -> None:
        """Something that the run made, or found in the store; what it was made of was told before."""

    def finish(self) -> None:
        """Flush and close."""
        if self._open is not None:
            with self._warn_of_failures("finish"):
                self._end()
            self._open = None

    def _end(self) -> None:
        """What a tracker does when a run ends; it may fail."""


class CsvTracker(Tracker):
    """Writes `metrics.csv`: one row a call, column `step` first.

    A metric met later adds a column; rows that lack a metric leave it empty. A restarted run continues the same
    file.
    """

    name = "csv"

    def _begin(self, start: Start) -> Path:
        start.folder.mkdir(parents=True, exist_ok=True)
        path = start.folder / "metrics.csv"
        self._columns, rows = _read(path)
        if self._columns:  # a run killed in mid-line left a row that would swallow the next one
            _rewrite(path, rows, self._columns)
        return path

    @guard
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        path = self._open
        row = {"step": step, **{quote_formula(name): value for name, value in metrics.items()}}
        if new := [name for name in row if name not in self._columns]:
            _rewrite(path, _read(path)[1], [*self._columns, *new])
            self._columns += new
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)


def _rewrite(path: Path, rows: list[dict[str, str]], columns: list[str]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    if is_stream(path):
        raise InputError(f"{path} is a pipe or a device, not a file")
    if not path.exists():
        return [], []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    return list(reader.fieldnames or ()), rows


class TensorBoardTracker(Tracker):
    """Metrics over steps, the leaderboard's means, and figures, in `tensorboard/JOB` of a run's folder.

    `tensorboard --logdir FOLDER` shows the event files, which tensorboardX writes.

    Raises `InputError` if tensorboardX is not installed.
    """

    name = "tensorboard"

    def __init__(self) -> None:
        try:
            import tensorboardX
        except ImportError as error:
            raise InputError(
                f"logger=tensorboard needs tensorboardX ({error}): pip install 'mergekit_lab[tensorboard]'"
            ) from None
        self._make: Any = tensorboardX.SummaryWriter

    def _begin(self, start: Start) -> Any:
        return self._make(str(start.folder / "tensorboard" / (start.job_type or start.name)))

    @guard
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._open.add_scalar(name, value, step)

    @guard
    def log_summary(self, table: Table) -> None:
        for row in table.rows:
            for measure, cell in (("average", row.average), ("normalized", row.normalized)):
                if cell.mean is not None:
                    self._open.add_scalar("/".join((*row.group, row.label, measure)), cell.mean)

    @guard
    def log_figure(self, name: str, path: Path | str) -> None:
        import numpy as np
        from PIL import Image

        pixels = np.asarray(Image.open(path, formats=["PNG"]).convert("RGB"))
        self._open.add_image(name, pixels, dataformats="HWC")

    def _end(self) -> None:
        self._open.close()
