"""Files that a run leaves in its folder, from which its report can be drawn again, or compared with others."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter, ValidationError

from mergekit_lab.errors import InputError
from mergekit_lab.paths import is_stream
from mergekit_lab.reporting.bootstrap import Samples
from mergekit_lab.reporting.origin import Origin
from mergekit_lab.reporting.plots import Curves, Searches
from mergekit_lab.reporting.published import Beside
from mergekit_lab.reporting.records import Failure, Record, Timing, read_records, strip_controls, write_text

SAMPLES = "samples.npz"
CONFIG = "config.yaml"


def _describe_points(*needed: str) -> Any:
    """A type that pydantic checks: points by label, each with the numbers that are needed to draw it."""

    def check(point: dict[str, Any]) -> dict[str, Any]:
        if set(needed) - set(point) or not all(isinstance(n, int | float) for n in point.values()):
            raise ValueError(f"{point} does not hold numbers {', '.join(needed)}")
        return point

    return dict[str, list[Annotated[dict[str, Any], AfterValidator(check)]]]


_JSON: dict[str, Any] = {
    "timings": dict[str, Timing],
    "curves": _describe_points("step"),
    "searches": _describe_points("coefficient", "normalized", "chosen"),
    "published": list[Beside],
    "origin": Origin,
}
"""The type of the content of `NAME.json`, by field of `RunFiles`."""
_adapt = cache(TypeAdapter)
"""A type's reader; making one takes milliseconds."""
FILES_READ = ("failure.json", "records.jsonl", CONFIG, SAMPLES, *(f"{name}.json" for name in _JSON))


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
        published: `published.json`, published numbers with ours.
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
        import numpy as np

        write_text(self.folder / CONFIG, self.config_yaml)
        for name in _JSON:
            file, content = self.folder / f"{name}.json", getattr(self, name)
            if content is None:
                file.unlink(missing_ok=True)
            else:
                text = json.dumps(content, default=asdict, ensure_ascii=False, indent=1)
                write_text(file, text + "\n")
        (self.folder / SAMPLES).unlink(missing_ok=True)
        if self.samples:
            partial = self.folder / f".{os.getpid()}.{SAMPLES}"
            np.savez_compressed(partial, **self.samples)
            partial.replace(self.folder / SAMPLES)


def read_run(folder: Path) -> RunFiles | Failure:
    """A run's files, or why its folder has none that can be read. Never raises."""
    name = str(folder)
    try:
        for file in FILES_READ:
            if is_stream(folder / file):  # reading one may never end, or fill the memory
                raise InputError(f"{folder / file} is a pipe or a device, not a file")
        if (folder / "failure.json").exists():
            failure = _read_json(folder / "failure.json", dict[str, Any])
            error = strip_controls(failure.get("error", "failed without a message"))
            return Failure(name, error, tuple(map(strip_controls, failure.get("overrides", ()))))
        if not (folder / "records.jsonl").exists():
            unreported = "no records.jsonl: the run did not reach its report"
            return Failure(name, unreported if folder.is_dir() else "no such folder")
        records = read_records(folder / "records.jsonl")
        if not records and not any((folder / "analysis").glob("*.png")):
            return Failure(name, "records.jsonl is empty")
        content = {name: _read_json(folder / f"{name}.json", kind) for name, kind in _JSON.items()}
        config = (folder / CONFIG).read_text(encoding="utf-8") if (folder / CONFIG).exists() else ""
        known = {name: value for name, value in content.items() if value is not None}
        return RunFiles(folder, records, config, samples=_read_samples(folder), **known)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        return Failure(name, str(error))


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


def _read_json(file: Path, kind: Any) -> Any:
    """What a file holds, as a value of this type; None if there is no file."""
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error})") from None
    try:
        return _adapt(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{file}: {f'{where}: ' if where else ''}{first['msg']}") from None
