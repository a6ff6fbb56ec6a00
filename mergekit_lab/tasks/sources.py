"""Read images of a data set from a folder, in the layouts that data sets are published in.

A part of a data set is `Rows`: labels, names for messages, and encoded images that are read in chunks. Layouts
are a repository of the Hugging Face hub (parquet files with image bytes, or tar files of a web data set),
folders of images by part and class, and FER-2013's CSV. Nothing here decodes an image.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mergekit_lab.errors import InputError, join_names, say_error

IMAGE_FILES = {".jpg", ".jpeg", ".png", ".webp", ".ppm", ".bmp", ".gif", ".tif", ".tiff"}
_CHUNK = 64
_LARGEST_LABEL = 1 << 31
_FER2013_LABELS = ("angry", "disgusted", "fearful", "happy", "sad", "surprised", "neutral")
FER2013_USAGE = {"train": {"Training"}, "test": {"PublicTest", "PrivateTest"}}


class Rows(ABC):
    """One part of a data set in its source.

    Attributes:
        labels: int64 `[N]`, in the source's numbering.
        label_names: the source's names of its labels, in their order; None if it has none.
        by_name: whether the source has only names. Then `labels` are positions in `label_names`, which lists
            the names in this part: the same number may be another class in another part.
        files: the files that hold the rows. Their sizes and times tell whether they changed.
    """

    labels: np.ndarray
    label_names: tuple[str, ...] | None = None
    by_name: bool = False
    files: list[Path]

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def chunks(self) -> list[range]:
        """Ranges of rows to read together. They cover all rows in order."""
        return [range(start, min(start + _CHUNK, len(self))) for start in range(0, len(self), _CHUNK)]

    @abstractmethod
    def load(self, chunk: int) -> list[bytes]:
        """The encoded images of a chunk."""

    @abstractmethod
    def name(self, row: int) -> str:
        """A row's image as messages call it."""


class ParquetRows(Rows):
    """Parquet files with a column of images (`{bytes, path}` or bytes) and one of labels.

    Args:
        files: the part's files, in order.
        image: the images' column. If no column has that name, the only column with images is taken.
        label: the labels' column, of integers, booleans or names.
    """

    def __init__(self, files: Sequence[Path], image: str, label: str) -> None:
        from pyarrow import parquet

        self.files = list(files)
        self.chunks, self._groups = [], []
        labels: list[Any] = []
        for file in files:
            with explain_parquet_errors(file):
                opened = parquet.ParquetFile(file)
            self._image = _find_image_column(file, opened.schema_arrow, image)
            if label not in opened.schema_arrow.names:
                raise InputError(
                    f"{file} has no column {label!r} of labels; columns: "
                    f"{join_names(opened.schema_arrow.names)}"
                )
            self.label_names = _name_labels(opened.schema_arrow, label)
            start = first = len(labels)
            with explain_parquet_errors(file):
                labels += opened.read(columns=[label]).column(label).to_pylist()
            for group in range(opened.num_row_groups):
                size = opened.metadata.row_group(group).num_rows
                self.chunks.append(range(first, first + size))
                self._groups.append((file, group, start))
                first += size
        self.labels, names = _number_labels(labels, self.name)
        self.label_names = names or self.label_names
        self.by_name = names is not None

    def load(self, chunk: int) -> list[bytes]:
        from pyarrow import parquet

        file, group, _ = self._groups[chunk]
        with explain_parquet_errors(file):
            opened = parquet.ParquetFile(file)
            rows = opened.read_row_group(group, columns=[self._image]).column(0).to_pylist()
        return [(row["bytes"] if isinstance(row, dict) else row) or b"" for row in rows]

    def name(self, row: int) -> str:
        file, _, start = next(g for g, rows in zip(self._groups, self.chunks, strict=True) if row in rows)
        return f"{file.name}, row {row - start}"


@contextmanager
def explain_parquet_errors(file: Path) -> Iterator[None]:
    """Turn errors of pyarrow into an `InputError` that names the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, KeyError) as error:
        reason = say_error(error)
        raise InputError(f"{file} is not a readable parquet file ({reason}): was the copy cut short?") from None


def _find_image_column(file: Path, schema: Any, wanted: str) -> str:
    from pyarrow import types

    def holds_images(kind: Any) -> bool:
        if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            kind = kind.field("bytes").type
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    candidates = [field.name for field in schema if holds_images(field.type)]
    if wanted in candidates:
        return wanted
    if wanted in schema.names:
        raise InputError(
            f"{file} has {schema.field(wanted).type} in its column {wanted!r}: expected the bytes of images"
        )
    if len(candidates) != 1:
        raise InputError(
            f"{file} has no column {wanted!r} of images, and {len(candidates)} columns that could be; columns: "
            f"{join_names(schema.names)}"
        )
    return str(candidates[0])


def _name_labels(schema: Any, label: str) -> tuple[str, ...] | None:
    """The names that the hub's library writes into a file's header."""
    try:
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (TypeError, KeyError, ValueError, RecursionError):
        return None
    named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if named else None


def _number_labels(
    labels: Sequence[Any], name: Callable[[int], str]
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Labels as integers; where they are names, as positions in the names that occur, and those.

    Raises:
        InputError: a label is neither a name nor a whole number that numbers classes; `name` says which.
    """
    named = any(isinstance(label, str) for label in labels)
    for row, label in enumerate(labels):
        whole = isinstance(label, int) or (isinstance(label, float) and label.is_integer())
        if not (isinstance(label, str) if named else whole and abs(label) < _LARGEST_LABEL):
            raise InputError(f"{name(row)} has the label {str(label)[:40]}: expected whole numbers or names")
    if not named:
        return np.array(labels, dtype=np.int64), None
    names = tuple(sorted(set(labels)))
    position = {name: number for number, name in enumerate(names)}
    return np.array([position[label] for label in labels], dtype=np.int64), names


def _read_number(text: str, name: str) -> int:
    """The number of a class.

    Raises:
        InputError: it is none; `name` says which.
    """
    text = text.strip()
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise InputError(f"{name} is {text[:40]!r}, not a class number")
    return int(text)


def _refuse_unreadable(error: OSError) -> None:
    raise InputError(f"{error.filename} cannot be read: {error.strerror}")


def refuse_no_files(files: Sequence[Path]) -> None:
    """A broken link, a loop of links, a folder or a pipe by the name of a file."""
    if odd := [str(file) for file in files if not file.is_file()]:
        raise InputError(f"no files that can be read: {join_names(odd, 3)}; remove them, or mend the links")


class FolderRows(Rows):
    """A folder with `<class>/<image>`."""

    by_name = True

    def __init__(self, folder: Path) -> None:
        inside = next(os.walk(folder, onerror=_refuse_unreadable))[1]
        classes = sorted(name for name in inside if not name.startswith("."))
        images = [(n, file) for n, name in enumerate(classes) for file in _list_image_files(folder / name)]
        self._folder = folder
        self.files = [file for _, file in images]
        refuse_no_files(self.files)
        self.labels = np.array([number for number, _ in images], dtype=np.int64)
        self.label_names = tuple(classes)

    def load(self, chunk: int) -> list[bytes]:
        return [self.files[row].read_bytes() for row in self.chunks[chunk]]

    def name(self, row: int) -> str:
        return str(self.files[row].relative_to(self._folder.parent))


def _list_image_files(folder: Path) -> list[Path]:
    """All below a folder, sorted; links to folders are not followed."""
    return sorted(
        Path(inside, name)
        for inside, _, names in os.walk(folder, onerror=_refuse_unreadable)
        for name in names
        if Path(name).suffix.lower() in IMAGE_FILES
    )


class TarRows(Rows):
    """A web data set: tar files with pairs of `key.<image>` and `key.cls`."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._members: list[tuple[Path, int, int, str]] = []
        labels: list[int] = []
        for file in files:
            images: dict[str, tarfile.TarInfo] = {}
            numbers: dict[str, int] = {}
            for member, text in _read_members(file):
                key = member.name.rpartition(".")[0]
                if text is None:
                    images[key] = member
                else:
                    numbers[key] = _read_number(text, f"{file}: the label {member.name}")
            for key, member in images.items():
                if key in numbers:
                    self._members.append((file, member.offset_data, member.size, member.name))
                    labels.append(numbers[key])
        self.labels = np.array(labels, dtype=np.int64)

    def load(self, chunk: int) -> list[bytes]:
        images = []
        for file, start, size, _ in (self._members[row] for row in self.chunks[chunk]):
            with file.open("rb") as opened:
                opened.seek(start)
                images.append(opened.read(size))
        return images

    def name(self, row: int) -> str:
        return f"{self._members[row][0].name}: {self._members[row][3]}"


def _read_members(file: Path) -> Iterator[tuple[tarfile.TarInfo, str | None]]:
    """The images of a tar file, and its labels with what they say; other members are passed over.

    Raises:
        InputError: it is no tar file, or an image or a label is a link, a folder or a device.
    """
    try:
        with tarfile.open(file, "r:") as opened:
            for member in opened:
                ending = Path(member.name).suffix.lower()
                if ending != ".cls" and ending not in IMAGE_FILES:
                    continue
                if not member.isreg() or member.issparse():
                    raise InputError(f"{file}: {member.name} must be a plain file")
                held = opened.extractfile(member) if ending == ".cls" else None
                yield member, None if held is None else held.read(64).decode("utf-8", "replace")
    except InputError:
        raise
    except (tarfile.TarError, OSError, ValueError) as error:
        raise InputError(
            f"{file} is not a readable web data set ({error}): expected a whole tar file, not compressed"
        ) from None


class Fer2013Rows(Rows):
    """FER-2013's archive: `fer2013.csv` with the columns emotion, pixels (48×48 gray levels) and Usage.

    Raises:
        InputError: a column is missing, or a line cannot be read.
    """

    def __init__(self, file: Path, part: str) -> None:
        self.files = [file]
        table: Any = None
        try:
            with file.open(encoding="utf-8-sig", newline="") as opened:
                table = csv.DictReader(opened)
                columns = table.fieldnames or ()
                every = [(table.line_num, row) for row in table]
        except (csv.Error, UnicodeDecodeError, OSError) as error:
            line = table.line_num if table else 0
            raise InputError(f"{file} cannot be read beyond line {line} ({error})") from None
        if lacking := {"emotion", "pixels", "Usage"} - set(columns):
            raise InputError(f"{file} has no column {join_names(lacking)}; columns: {join_names(columns)}")
        known = set().union(*FER2013_USAGE.values())
        for line, row in every:
            if row["Usage"] not in known:
                raise InputError(f"{file}, line {line}: the usage is {row['Usage']!r}, not {join_names(known)}")
        rows = [(line, row) for line, row in every if row["Usage"] in FER2013_USAGE.get(part, ())]
        self._pixels = [(line, row["pixels"] or "") for line, row in rows]
        numbers = [_read_number(r["emotion"] or "", f"{file}, line {line}: the emotion") for line, r in rows]
        self.labels = np.array(numbers, dtype=np.int64)
        self.label_names = _FER2013_LABELS

    def load(self, chunk: int) -> list[bytes]:
        return [_encode_gray(self._pixels[row][1]) for row in self.chunks[chunk]]

    def name(self, row: int) -> str:
        return f"{self.files[0].name}, line {self._pixels[row][0]}"


def _encode_gray(pixels: str) -> bytes:
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
