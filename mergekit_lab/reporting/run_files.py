"""Files that a run leaves in its folder, from which its report can be drawn again, or compared with others."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mergekit_lab.errors import InputError
from mergekit_lab.paths import is_stream
from mergekit_lab.reporting.bootstrap import Samples
from mergekit_lab.reporting.origin import Origin, read_origin, write_origin
from mergekit_lab.reporting.plots import Curves, Searches
from mergekit_lab.reporting.published import FILE as PUBLISHED
from mergekit_lab.reporting.published import Beside, read_beside, write_beside
from mergekit_lab.reporting.records import Failure, Record, Timing, read_records, strip_controls, write_text

SAMPLES = "samples.npz"
CONFIG = "config.yaml"
FILES_READ = (
    *("failure.json", "records.jsonl", "timings.json", "curves.json", "searches.json"),
    *(CONFIG, SAMPLES, PUBLISHED),
)


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's files.

    Attributes:
        folder: where they are.
        records: `records.jsonl`, which is a report's own file and is written with its views.
        config_yaml: `config.yaml`, the composed configuration; it is shown as it is.
        curves: `curves.json`, training curves by expert; see `plots.Curves`.
        searches: `searches.json`, coefficient searches by merger; see `plots.Searches`.
        timings: `timings.json`, by stage in the order run.
        samples: `samples.npz`, what every test sample contributed, by evaluation key, from which averages get
            intervals; no file where there are none.
        published: published numbers with ours.
        origin: `origin.json`, how the run was made; no file where it is not known.
    """

    folder: Path
    records: list[Record]
    config_yaml: str = ""
    curves: Curves = field(default_factory=dict)
    searches: Searches = field(default_factory=dict)
    timings: Mapping[str, Timing] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)
    published: Sequence[Beside] = ()
    origin: Origin | None = None

    def write(self) -> None:
        """All files but the records'."""
        _write_samples(self.folder, self.samples)
        write_beside(self.folder, self.published)
        write_text(self.folder / CONFIG, self.config_yaml)
        write_origin(self.folder, self.origin)
        timings = {stage: asdict(timing) for stage, timing in self.timings.items()}
        for name, content in (("curves", self.curves), ("searches", self.searches), ("timings", timings)):
            text = json.dumps(content, ensure_ascii=False, indent=1)
            write_text(self.folder / f"{name}.json", text + "\n")


def read_run(folder: Path) -> RunFiles | Failure:
    """A run's files, or why its folder has none that can be read. Never raises."""
    name = str(folder)
    try:
        for file in FILES_READ:
            if is_stream(folder / file):  # whoever reads one may wait without end, or fill the memory
                raise InputError(f"{folder / file} is a pipe or a device, not a file")
        if (folder / "failure.json").exists():
            failure = _read_object(folder / "failure.json")
            error = strip_controls(failure.get("error", "failed without a message"))
            return Failure(name, error, tuple(map(strip_controls, failure.get("overrides", ()))))
        if not (folder / "records.jsonl").exists():
            unreported = "no records.jsonl: the run did not reach its report"
            return Failure(name, unreported if folder.is_dir() else "no such folder")
        records = read_records(folder / "records.jsonl")
        if not records and not any((folder / "analysis").glob("*.png")):
            return Failure(name, "records.jsonl is empty")
        timings = {
            stage: _read_timing(**timing) for stage, timing in _read_object(folder / "timings.json").items()
        }
        curves = _read_series(folder / "curves.json", "step")
        searches = _read_series(folder / "searches.json", "coefficient", "normalized", "chosen")
        config = (folder / CONFIG).read_text(encoding="utf-8") if (folder / CONFIG).exists() else ""
        samples, published = _read_samples(folder), read_beside(folder)
        origin = read_origin(folder)
        return RunFiles(folder, records, config, curves, searches, timings, samples, published, origin)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        return Failure(name, str(error))


def _write_samples(folder: Path, samples: Samples) -> None:
    import numpy as np

    (folder / SAMPLES).unlink(missing_ok=True)
    if samples:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{os.getpid()}.{SAMPLES}"
        arrays: dict[str, Any] = {key: np.asarray(values) for key, values in samples.items()}
        np.savez_compressed(partial, **arrays)
        partial.replace(folder / SAMPLES)


def _read_samples(folder: Path) -> Samples:
    import numpy as np

    if not (folder / SAMPLES).exists():
        return {}
    try:
        with (folder / SAMPLES).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            samples = dict(archive)
    except Exception as error:  # a damaged archive makes zipfile and zlib raise anything
        raise InputError(f"{folder / SAMPLES} cannot be read: {error!r}") from None
    for key, values in samples.items():
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise InputError(f"{folder / SAMPLES}: {key} is {values.dtype}{values.shape}, not a row of numbers")
    return samples


def _read_timing(seconds: float, computed: int = 0, reused: int = 0) -> Timing:
    if not math.isfinite(seconds):
        raise InputError(f"a stage took {seconds} seconds")
    return Timing(float(seconds), int(computed), int(reused))


def _read_series(path: Path, *needed: str) -> dict[str, Any]:
    """Points by label, each with the numbers that are needed to draw it."""
    content = _read_object(path)
    for label, points in content.items():
        point: Any
        for point in points if isinstance(points, list) else [None]:
            numbers = isinstance(point, dict) and all(isinstance(n, int | float) for n in point.values())
            if not numbers or any(name not in point for name in needed):
                raise InputError(f"{path}: {label!r} holds {point!r}, not numbers {', '.join(needed)}")
    return content


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: a JSON object is expected, not {type(content).__name__}")
    return content
