"""Check a data set on disk against what was published: sizes, classes, corrupt and shared images."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from mergekit_lab.errors import InputError, join_names
from mergekit_lab.tasks.decoding import decode, map_chunks
from mergekit_lab.tasks.images import HubImages
from mergekit_lab.tasks.sources import Rows
from mergekit_lab.tasks.task import PARTS, ImageSamples, ImageTask, digest_images

_SHOWN = 20


@dataclass(frozen=True)
class PartCheck:
    """One part of a task.

    Attributes:
        images: number of images.
        published: number of images that the source should have, if that is known.
        classes: number of class names that occur.
        smallest, largest: number of images of the rarest and the most frequent class that occurs.
        corrupt: names of images that cannot be decoded, up to 20.
        corrupt_count: number of such images.
    """

    images: int
    published: int | None
    classes: int
    smallest: int
    largest: int
    corrupt: list[str] = field(default_factory=list)
    corrupt_count: int = 0


@dataclass(frozen=True)
class DataCheck:
    """The result of checking one task.

    Attributes:
        task: its name.
        class_names: number of class names.
        parts: by name.
        shared: for each pair of parts, how many pictures of the second are in the first too, compared by
            pixels.
        shared_names: names of some of those pictures, if they have names.
        other_labels: `number: the source's name ↔ ours`, for labels that a part names differently.
        misplaced: those of them whose name is ours for another number.
        unusable: why the data could not be read; then `parts` is empty.
    """

    task: str
    class_names: int
    parts: Mapping[str, PartCheck]
    shared: Mapping[str, int]
    shared_names: list[str] = field(default_factory=list)
    other_labels: list[str] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)
    unusable: str | None = None

    @property
    def wrong(self) -> list[str]:
        """Problems that should stop a run."""
        faults = [self.unusable] if self.unusable else []
        for part, check in self.parts.items():
            if check.corrupt_count:
                faults.append(f"{self.task}: {check.corrupt_count} images of {part} cannot be decoded")
        if self.misplaced:
            names = join_names(self.misplaced)
            faults.append(f"{self.task}: names of classes have other classes' numbers ({names})")
        return faults


def check_task(task: ImageTask) -> DataCheck:
    """Decode every image of a task, and report what it holds and what is wrong."""
    if not isinstance(task, HubImages):
        return _check_tensors(task)
    try:
        return _check_files(task)
    except InputError as error:
        return DataCheck(task.name, len(task.classes), {}, {}, unusable=str(error))


def _check_tensors(task: ImageTask) -> DataCheck:
    every: dict[str, ImageSamples] = {part: task.load_samples(part) for part in PARTS}
    seen = {part: [(digest, "") for digest in digest_images(s.images[:])] for part, s in every.items()}
    checks = {part: _count(samples.labels.numpy(), None) for part, samples in every.items()}
    return DataCheck(task.name, len(task.classes), checks, _find_shared(seen)[0])


def _check_files(task: HubImages) -> DataCheck:
    seen: dict[str, list[tuple[bytes, str]]] = {}
    checks: dict[str, PartCheck] = {}
    labeled = {part: task.list_labels(part) for part in PARTS}
    pixels = {part: _digest_pixels(rows) for part, rows in task.rows.items()}
    for part, (labels, where, chosen) in labeled.items():
        rows = task.rows[where]
        kept = [(pixels[where][row], rows.name(int(row))) for row in chosen]
        seen[part] = [(digest, name) for digest, name in kept if digest is not None]
        published = task.sizes.get(part)
        if part == "train" and where == "train" and published is not None and "validation" not in task.rows:
            published -= task.count_validation(published)
        checks[part] = _count(labels, published, [name for digest, name in kept if digest is None])
    return DataCheck(task.name, len(task.classes), checks, *_find_shared(seen), *_list_other_labels(task))


def _digest_pixels(rows: Rows) -> list[bytes | None]:
    """A hash of every picture's size and pixels; None where it cannot be decoded."""

    def work(_: range, images: list[bytes]) -> list[bytes | None]:
        digests: list[bytes | None] = []
        for encoded in images:
            try:
                image = decode(encoded)
                seen = hashlib.blake2b(repr(image.size).encode(), digest_size=16)
                seen.update(image.tobytes())
                digests.append(seen.digest())
            except OSError:
                digests.append(None)
        return digests

    return [digest for chunk in map_chunks(rows, work) for digest in chunk]


def _count(labels: np.ndarray, published: int | None, corrupt: Sequence[str] = ()) -> PartCheck:
    counts = Counter(labels.tolist()).values()
    names = list(corrupt[:_SHOWN])
    return PartCheck(len(labels), published, len(counts), min(counts), max(counts), names, len(corrupt))


def _find_shared(seen: Mapping[str, Sequence[tuple[bytes, str]]]) -> tuple[dict[str, int], list[str]]:
    """How many pictures each two parts share, and names of some, from all hashes and names by part."""
    counts, names = {}, []
    for a, b in combinations(seen, 2):
        first = dict(seen[a])
        shared = [(digest, name) for digest, name in seen[b] if digest in first]
        counts[f"{a}, {b}"] = len(shared)
        names += [f"{a}: {first[digest]} = {b}: {name}" for digest, name in dict(shared).items()]
    return counts, names[:_SHOWN]


def _list_other_labels(task: HubImages) -> tuple[list[str], list[str]]:
    """The source's names beside ours where they differ, in any part, and those that are ours elsewhere.

    A number as a name says nothing beyond itself.
    """
    other: dict[str, bool] = {}
    for part, rows in task.rows.items():
        for name, number in zip(rows.label_names or (), task.labeling.map_numbers(part).tolist(), strict=False):
            ours = task.labeling.find_class(name)
            if ours == number or number >= len(task.classes) or (name.isdecimal() and int(name) == number):
                continue
            other[f"{number}: {name} ↔ {task.classes[number]}"] = ours is not None
    return list(other), [line for line, misplaced in other.items() if misplaced]
