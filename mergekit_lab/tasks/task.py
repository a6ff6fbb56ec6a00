"""What a task is: images with labels in three parts, class names and prompt templates.

Legend: N images, C classes, H×W pixels. Nothing here reads a configuration or a model.
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mergekit_lab.errors import InputError, suggestion

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a task's data, in memory.

    images: uint8 `[N, 3, H, W]`; labels: int64 `[N]` in `0 … C-1`. The tensors are shared by everyone who asks
    for the part: read them, do not write into them.
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3:
            raise InputError(f"images must be uint8 [N, 3, H, W], got {images.dtype} {list(images.shape)}")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise InputError(
                f"labels must be int64 [{len(images)}], one an image, got {labels.dtype} {list(labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Task(ABC):
    """A classification task: subclass it, name the classes, make the three parts.

    A subclass is a frozen dataclass whose fields are its hyper-parameters, so equal tasks have equal data.
    `templates` are prompts with one `{}` for the class name; a zero-shot head averages over them.
    `rendered` says that the images are drawn by this package, not taken from people or cameras.
    """

    name: str

    classes: ClassVar[tuple[str, ...]]
    templates: ClassVar[tuple[str, ...]]
    rendered: ClassVar[bool] = False

    @abstractmethod
    def make(self, part: Part) -> Split:
        """Build one part from the fields alone: the same fields give the same bytes."""

    def split(self, part: Part) -> Split:
        """The part `train`, `validation` or `test`, built once per process.

        Raises `InputError` for any other part.
        """
        if part not in PARTS:
            raise InputError(f"task {self.name!r} has no part {part!r}{suggestion(str(part), PARTS)}")
        return _made(self, part)

    def fingerprint(self) -> str:
        """SHA-256 over name, classes, templates and the bytes of all three parts (64 hex digits).

        Rendered images go through floating-point resampling: the digest is the same wherever Pillow, FreeType,
        torch and the kind of processor are the same, and may differ elsewhere.
        """
        return _fingerprint(self)


@cache
def _made(task: Task, part: Part) -> Split:
    split = task.make(part)
    if len(split) == 0:
        raise InputError(f"task {task.name!r} has an empty part {part!r}: raise its size")
    low, high = int(split.labels.min()), int(split.labels.max())
    if low < 0 or high >= len(task.classes):
        raise InputError(
            f"task {task.name!r} names {len(task.classes)} classes, but labels of {part!r} span {low} … {high}"
        )
    return split


@cache
def _fingerprint(task: Task) -> str:
    digest = hashlib.sha256(repr((task.name, task.classes, task.templates)).encode())
    for part in PARTS:
        split = task.split(part)
        digest.update(repr((part, tuple(split.images.shape))).encode())
        digest.update(split.images.contiguous().numpy().data)
        digest.update(split.labels.contiguous().numpy().data)
    return digest.hexdigest()


def image_digests(images: Tensor) -> list[bytes]:
    """A 16-byte content hash of every image of `[N, …]`, for finding pictures that stand in two places."""
    rows = np.ascontiguousarray(images.numpy()).reshape(len(images), -1)
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]


def shared_images(task: Task) -> dict[tuple[Part, Part], int]:
    """How many images of one part stand in another, for the three pairs of parts; all zero means no leak."""
    seen = {part: set(image_digests(task.split(part).images)) for part in PARTS}
    pairs: list[tuple[Part, Part]] = [("train", "validation"), ("train", "test"), ("validation", "test")]
    return {(a, b): len(seen[a] & seen[b]) for a, b in pairs}
