"""Where a data set's images come from: a folder in one of the layouts that data sets are published in.

A part of a data set is `Rows`: labels, names for messages, and encoded images that are read in chunks. Layouts:
a repository of the Hugging Face hub (parquet files with image bytes, or tar files of a web data set), folders
of images by part and class, and FER-2013's own CSV. Nothing here decodes an image.
"""

from __future__ import annotations

import csv
import io
import json
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mergekit_lab.errors import InputError, listing

IMAGE_FILES = {".jpg", ".jpeg", ".png", ".webp", ".ppm", ".bmp", ".gif", ".tif", ".tiff"}
_CHUNK = 64
_SHARD = re.compile(r"(\d+)-of-(\d+)")
_FER2013_LABELS = ("angry", "disgusted", "fearful", "happy", "sad", "surprised", "neutral")
_FER2013_USAGE = {"train": {"Training"}, "test": {"PublicTest", "PrivateTest"}}


class Rows(ABC):
    """One part of a data set, as its source has it.

    Attributes:
        labels: int64 `[N]`, the source's own numbers.
        label_names: what the source calls its labels, in their order; None where it does not say.
        by_name: whether the source has names alone. Then `labels` are places in `label_names`, which holds what
            occurs in this part: the same number may be another class in another part.
        chunks: ranges of rows that are read together; they cover all rows in order.
        files: the files that decide the rows; their sizes and times say whether they are still the same.
    """

    labels: np.ndarray
    label_names: tuple[str, ...] | None = None
    by_name: bool = False
    chunks: list[range]
    files: list[Path]

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def load(self, chunk: int) -> list[bytes]:
        """The encoded images of a chunk."""

    @abstractmethod
    def name(self, row: int) -> str:
        """What a message calls a row's image."""


def _in_chunks(total: int) -> list[range]:
    return [range(start, min(start + _CHUNK, total)) for start in range(0, total, _CHUNK)]


class ParquetRows(Rows):
    """Parquet files with a column of images (`{bytes, path}` or bytes) and one of labels.

    Args:
        files: the part's files, in order.
        image: the images' column; where there is none of that name, the only column of that kind.
        label: the labels' column: integers, booleans or names.
    """

    def __init__(self, files: Sequence[Path], image: str, label: str) -> None:
        from pyarrow import parquet

        self.files = list(files)
        self.chunks, self._groups = [], []
        labels: list[Any] = []
        for file in files:
            opened = _open_parquet(file)
            self._image = _image_column(file, opened.schema_arrow, image)
            if label not in opened.schema_arrow.names:
                raise InputError(
                    f"{file} has no column {label!r} of labels; columns: {listing(opened.schema_arrow.names)}"
                )
            self.label_names = _label_names(opened.schema_arrow, label)
            first = len(labels)
            with _readable(file):
                labels += parquet.read_table(file, columns=[label]).column(label).to_pylist()
            for group in range(opened.num_row_groups):
                size = opened.metadata.row_group(group).num_rows
                self.chunks.append(range(first, first + size))
                self._groups.append((file, group))
                first += size
        self.labels, names = _numbered(labels, self.name)
        self.label_names = names or self.label_names
        self.by_name = names is not None

    def load(self, chunk: int) -> list[bytes]:
        file, group = self._groups[chunk]
        opened = _open_parquet(file)
        with _readable(file):
            rows = opened.read_row_group(group, columns=[self._image]).column(0).to_pylist()
        return [(row["bytes"] if isinstance(row, dict) else row) or b"" for row in rows]

    def name(self, row: int) -> str:
        at = next(i for i, rows in enumerate(self.chunks) if row in rows)
        return f"{self._groups[at][0].name}, row {row - self._first_row(at)}"

    def _first_row(self, chunk: int) -> int:
        """The first row of the file that holds a chunk."""
        file = self._groups[chunk][0]
        return next(
            rows.start for rows, (other, _) in zip(self.chunks, self._groups, strict=True) if other == file
        )


def _open_parquet(file: Path) -> Any:
    from pyarrow import parquet

    with _readable(file):
        return parquet.ParquetFile(file)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    from pyarrow import ArrowInvalid

    try:
        yield
    except (ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{file} is no readable parquet file ({reason}): was the copy cut short?") from None


def _image_column(file: Path, schema: Any, wanted: str) -> str:
    from pyarrow import types

    def holds_images(kind: Any) -> bool:
        if types.is_struct(kind):
            return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    found = [field.name for field in schema if holds_images(field.type)]
    if wanted in found:
        return wanted
    if wanted in schema.names:
        raise InputError(
            f"{file} has {schema.field(wanted).type} in its column {wanted!r}: expected the bytes of images"
        )
    if len(found) != 1:
        raise InputError(
            f"{file} has no column {wanted!r} of images, and {len(found)} columns that could be; columns: "
            f"{listing(schema.names)}"
        )
    return str(found[0])


def _label_names(schema: Any, label: str) -> tuple[str, ...] | None:
    """The names that the hub's library writes into a file's header."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return tuple(features[label]["names"])
    except (TypeError, KeyError, ValueError):
        return None


def _numbered(labels: Sequence[Any], name: Callable[[int], str]) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Labels as integers; where they are names, as places in the names that occur, and those.

    Raises:
        InputError: a label is neither a name nor a whole number; `name` says which.
    """
    for row, label in enumerate(labels):
        if not isinstance(label, (str, int)) and not (isinstance(label, float) and label.is_integer()):
            raise InputError(f"{name(row)} has the label {label}: expected whole numbers or names")
    if labels and isinstance(labels[0], str):
        names = tuple(sorted(set(labels)))
        place = {name: number for number, name in enumerate(names)}
        return np.array([place[label] for label in labels], dtype=np.int64), names
    return np.array(labels, dtype=np.int64), None


class FolderRows(Rows):
    """`<class>/<image>` below one folder."""

    by_name = True

    def __init__(self, folder: Path) -> None:
        classes = sorted(
            place for place in folder.iterdir() if place.is_dir() and not place.name.startswith(".")
        )
        found = [
            (number, file)
            for number, place in enumerate(classes)
            for file in sorted(place.rglob("*"))
            if file.suffix.lower() in IMAGE_FILES
        ]
        self._folder = folder
        self._images = [file for _, file in found]
        self.labels = np.array([number for number, _ in found], dtype=np.int64)
        self.label_names = tuple(place.name for place in classes)
        self.chunks = _in_chunks(len(found))
        self.files = self._images

    def load(self, chunk: int) -> list[bytes]:
        return [self._images[row].read_bytes() for row in self.chunks[chunk]]

    def name(self, row: int) -> str:
        return str(self._images[row].relative_to(self._folder.parent))


class TarRows(Rows):
    """A web data set: tar files in which `key.<image>` stands beside `key.cls`."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._places: list[tuple[Path, int, int, str]] = []
        labels: list[int] = []
        for file in files:
            images: dict[str, tarfile.TarInfo] = {}
            numbers: dict[str, int] = {}
            try:
                with tarfile.open(file) as opened:
                    for member in opened:
                        key, _, kind = member.name.rpartition(".")
                        if f".{kind.lower()}" in IMAGE_FILES:
                            images[key] = member
                        elif kind == "cls":
                            numbers[key] = int(opened.extractfile(member).read())  # type: ignore[union-attr]
            except (tarfile.TarError, OSError, ValueError) as error:
                raise InputError(f"{file} is no readable web data set ({error})") from None
            for key, member in images.items():
                if key not in numbers:
                    continue
                self._places.append((file, member.offset_data, member.size, member.name))
                labels.append(numbers[key])
        self.labels = np.array(labels, dtype=np.int64)
        self.chunks = _in_chunks(len(labels))

    def load(self, chunk: int) -> list[bytes]:
        found = []
        for file, start, size, _ in (self._places[row] for row in self.chunks[chunk]):
            with file.open("rb") as opened:
                opened.seek(start)
                found.append(opened.read(size))
        return found

    def name(self, row: int) -> str:
        return f"{self._places[row][0].name}: {self._places[row][3]}"


class Fer2013Rows(Rows):
    """FER-2013's archive: `fer2013.csv` with the columns emotion, pixels (48×48 gray levels) and Usage.

    Raises:
        InputError: a column is missing, or a line cannot be read.
    """

    def __init__(self, file: Path, part: str) -> None:
        wanted = _FER2013_USAGE.get(part, set())
        self.files = [file]
        self._file = file
        with file.open(newline="") as opened:
            table = csv.DictReader(opened)
            try:
                rows = [(table.line_num, row) for row in table if row.get("Usage") in wanted]
            except (csv.Error, UnicodeDecodeError) as error:
                raise InputError(f"{file} cannot be read beyond line {table.line_num} ({error})") from None
        columns = table.fieldnames or ()
        if lacking := {"emotion", "pixels", "Usage"} - set(columns):
            raise InputError(f"{file} has no column {listing(lacking)}; columns: {listing(columns)}")
        for line, row in rows:
            if not (row["emotion"] or "").strip().isdecimal():
                raise InputError(f"{file}, line {line}: the emotion is {row['emotion']!r}, not a number")
        self._lines = [line for line, _ in rows]
        self._pixels = [row["pixels"] or "" for _, row in rows]
        self.labels = np.array([int(row["emotion"]) for _, row in rows], dtype=np.int64)
        self.label_names = _FER2013_LABELS
        self.chunks = _in_chunks(len(rows))

    def load(self, chunk: int) -> list[bytes]:
        return [_gray_picture(self._pixels[row]) for row in self.chunks[chunk]]

    def name(self, row: int) -> str:
        return f"{self._file.name}, line {self._lines[row]}"


def _gray_picture(pixels: str) -> bytes:
    """A square of gray levels as PNG; no bytes, which are no picture, where the levels are none."""
    from PIL import Image

    out = io.BytesIO()
    try:
        gray = np.array([int(level) for level in pixels.split()], dtype=np.uint8)
        side = int(len(gray) ** 0.5)
        Image.fromarray(gray.reshape(side, side)).save(out, "PNG")
    except (ValueError, OverflowError):
        return b""
    return out.getvalue()


def part_files(files: Sequence[str], part: str, subset: str | None) -> list[str]:
    """Those of a repository's parquet or tar files that hold a part, by the hub's naming.

    `data/train-00000-of-00002.parquet`, `<subset>/train-….parquet`, `<subset>/train/0000.parquet`,
    `train/0.tar`.
    """
    data = sorted(file for file in files if file.endswith((".parquet", ".tar")))
    inside = [file for file in data if subset in Path(file).parts[:-1]] if subset else []
    return [file for file in inside or data if re.search(rf"(^|/){re.escape(part)}([-_./]|$)", file)]


def counted(file: str) -> bool:
    """Whether a file's name tells how many there are, `train-00000-of-00002.parquet`."""
    return _SHARD.search(file) is not None


def missing_shards(files: Sequence[str]) -> list[str]:
    """What is not among files whose names tell how many there are: `1 of 2 files data/train-…`."""
    found: dict[tuple[str, int], set[str]] = {}
    for file in files:
        if shard := _SHARD.search(file):
            found.setdefault((file[: shard.start()], int(shard[2])), set()).add(shard[1])
    return [
        f"{total - len(numbers)} of {total} files {stem}…"
        for (stem, total), numbers in found.items()
        if len(numbers) < total
    ]


def open_rows(folder: Path, parts: Sequence[str], subset: str | None, image: str, label: str) -> Rows | None:
    """The first of the parts that a folder has, in whichever layout; None if it has none.

    Args:
        parts: names of the part, in the order of preference.
        subset: a repository's subset, where it has several.
        image, label: columns of parquet files.

    Raises:
        InputError: files that cannot be read, or lack a column.
    """
    names = [str(p.relative_to(folder)) for kind in ("*.parquet", "*.tar") for p in folder.rglob(kind)]
    for part in parts:
        listed = part_files(names, part, subset)
        if missing := missing_shards(listed):
            raise InputError(f"{folder} lacks {listing(missing)}: was the copy cut short?")
        files = [folder / file for file in listed]
        if files and files[0].suffix == ".parquet":
            return ParquetRows(files, image, label)
        images = FolderRows(folder / part) if (folder / part).is_dir() else None
        if files:
            rows = TarRows(files)
            return rows if len(rows) or not images else images  # an archive beside what came out of it
        if (folder / "fer2013.csv").is_file():
            if part in _FER2013_USAGE:
                return Fer2013Rows(folder / "fer2013.csv", part)
        elif images is not None and (len(images) or not names):
            return images
    return None
