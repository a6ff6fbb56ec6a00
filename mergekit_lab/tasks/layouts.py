"""Which of a folder's files are a part's, in whichever layout a data set has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mergekit_lab.errors import InputError, join_names
from mergekit_lab.tasks.sources import (
    FER2013_USAGE,
    Fer2013Rows,
    FolderRows,
    ParquetRows,
    Rows,
    TarRows,
    refuse_no_files,
)

_SHARD = re.compile(r"(\d+)-of-(\d+)")


def find_part_files(files: Sequence[str], part: str, subset: str | None) -> list[str]:
    """The repository's parquet or tar files that hold a part, by the hub's naming.

    `data/train-00000-of-00002.parquet`, `<subset>/train-….parquet`, `<subset>/train/0000.parquet`,
    `train/0.tar`.
    """
    data = sorted(file for file in files if file.endswith((".parquet", ".tar")))
    inside = [file for file in data if subset in Path(file).parts[:-1]] if subset else []
    return [file for file in inside or data if re.search(rf"(^|/){re.escape(part)}([-_./]|$)", file)]


def is_shard(file: str) -> bool:
    """Whether a file's name says how many files there are, like `train-00000-of-00002.parquet`."""
    return _SHARD.search(file) is not None


def find_missing_shards(files: Sequence[str]) -> list[str]:
    """Describe missing files of a numbered set, like `1 of 2 files data/train-…`."""
    numbered: dict[tuple[str, int], set[str]] = {}
    for file in files:
        if shard := _SHARD.search(file):
            numbered.setdefault((file[: shard.start()], int(shard[2])), set()).add(shard[1])
    return [
        f"{total - len(numbers)} of {total} files {stem}…"
        for (stem, total), numbers in numbered.items()
        if len(numbers) < total
    ]


def open_rows(folder: Path, parts: Sequence[str], subset: str | None, image: str, label: str) -> Rows | None:
    """Open the first of these parts that a folder has, in any layout; None if it has none.

    Args:
        parts: the part's names, in the order of preference.
        subset: a repository's subset, if it has several.
        image, label: columns of parquet files.

    Raises:
        InputError: a file cannot be read or lacks a column.
    """
    names = [str(p.relative_to(folder)) for kind in ("*.parquet", "*.tar") for p in folder.rglob(kind)]
    for part in parts:
        listed = find_part_files(names, part, subset)
        if missing := find_missing_shards(listed):
            raise InputError(f"{folder} lacks {join_names(missing)}: was the copy cut short?")
        files = [folder / file for file in listed]
        refuse_no_files(files)
        if files and files[0].suffix == ".parquet":
            return ParquetRows(files, image, label)
        images = FolderRows(folder / part) if (folder / part).is_dir() else None
        if files:
            rows = TarRows(files)
            return rows if len(rows) or not images else images  # an archive beside what came out of it
        if (folder / "fer2013.csv").is_file():
            if part in FER2013_USAGE:
                return Fer2013Rows(folder / "fer2013.csv", part)
        elif images is not None and (len(images) or not names):
            return images
    return None
