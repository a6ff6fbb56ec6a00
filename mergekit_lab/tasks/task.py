"""A task: samples in three parts, and the name of the metric that scores them. Image tasks are defined here.

Legend: N images, C classes, H×W pixels. Nothing here reads a configuration or a model. An `Objective` says how
a backbone learns a task and is scored.
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mergekit_lab.errors import InputError, suggest
from mergekit_lab.tasks.decoding import Packed, Pictures

Part = Literal["train", "validation", "test"]
"""The name of a part."""
PARTS: tuple[Part, ...] = get_args(Part)
"""The three parts."""


@dataclass(frozen=True, eq=False)
class ImageSamples:
    """One part of a task's data, in memory or mapped into it.

    images: uint8 `[N, 3, H, W]`, or `Pictures` of many sizes, which return such squares when indexed. labels:
    int64 `[N]` in `0 … C-1`. All users of the part share the tensors: do not write into them.
    """

    images: Tensor | Pictures
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

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of these samples."""
        return self.images[index], self.labels[index]

    def pack(self, index: Tensor) -> Packed:
        """Pictures of these samples before any crop."""
        if isinstance(self.images, Pictures):
            return self.images.pack(index)
        images = self.images[index]
        height, width = images.shape[-2:]
        return Packed(images.reshape(-1), np.tile([[height, width]], (len(images), 1)), height, width)


@dataclass(frozen=True)
class Task(ABC):
    """What a model learns: three parts of samples. The kinds are `ImageTask` and `TextTask`.

    A subclass is a frozen dataclass whose fields are its hyper-parameters, so equal tasks have equal data.
    """

    name: str

    @property
    @abstractmethod
    def metric(self) -> str:
        """The name of the metric that scores the task. Its value is at most 1, and larger is better."""

    @abstractmethod
    def make(self, part: Part) -> Any:
        """Build one part only from the fields: the same fields give the same bytes."""

    @abstractmethod
    def digest(self) -> str:
        """Compute what `fingerprint` returns."""

    @abstractmethod
    def check(self, part: Part, samples: Any) -> None:
        """Raise `InputError` if a part does not fit the task."""

    def load_samples(self, part: Part) -> Any:
        """The part `train`, `validation` or `test`, built once per process.

        Raises `InputError` for any other part.
        """
        if part not in PARTS:
            raise InputError(f"task {self.name!r} has no part {part!r}{suggest(str(part), PARTS)}")
        if part not in self._made:
            samples = self.make(part)
            if len(samples) == 0:
                raise InputError(f"task {self.name!r} has an empty part {part!r}: raise its size")
            self.check(part, samples)
            self._made[part] = samples
        return self._made[part]

    def count(self, part: Part) -> int:
        """The number of samples in a part."""
        return len(self.load_samples(part))

    def fingerprint(self) -> str:
        """SHA-256 of all that a model is trained and scored with (64 hex digits)."""
        if "digest" not in self._made:
            self._made["digest"] = self.digest()
        digest: str = self._made["digest"]
        return digest

    @property
    def _made(self) -> dict[str, Any]:
        """What equal tasks share: their parts, and the digest."""
        return _find_made(self)


@dataclass(frozen=True)
class ImageTask(Task):
    """A classification task: subclass it, name the classes, make the three parts.

    `templates` are prompts with one `{}` for the class name; a zero-shot head averages over them.
    `rendered` says that the images are drawn by this package, not taken from people or cameras.
    """

    classes: ClassVar[tuple[str, ...]]
    templates: ClassVar[tuple[str, ...]]
    rendered: ClassVar[bool] = False
    metric: ClassVar[str] = "accuracy"

    def check(self, part: Part, samples: ImageSamples) -> None:
        low, high = int(samples.labels.min()), int(samples.labels.max())
        if low < 0 or high >= len(self.classes):
            count = len(self.classes)
            raise InputError(
                f"task {self.name!r} names {count} classes, but labels of {part!r} span {low} … {high}"
            )

    def digest(self) -> str:
        """Hash of name, classes, templates and the bytes of all three parts.

        Rendering resamples in floating point. The digest is the same if Pillow, FreeType, torch and the kind of
        processor are, and may differ otherwise.
        """
        digest = hashlib.sha256(repr((self.name, self.classes, self.templates)).encode())
        for part in PARTS:
            samples = self.load_samples(part)
            digest.update(repr((part, tuple(samples.images.shape))).encode())
            digest.update(samples.images[:].contiguous().numpy().data)
            digest.update(samples.labels.contiguous().numpy().data)
        return digest.hexdigest()


@cache
def _find_made(task: Task) -> dict[str, Any]:
    return {}


def digest_images(images: Tensor) -> list[bytes]:
    """A 16-byte hash of each image in `[N, …]`, to find pictures that are in two parts."""
    rows = np.ascontiguousarray(images.numpy()).reshape(len(images), -1)
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]


def count_shared_images(task: ImageTask) -> dict[tuple[Part, Part], int]:
    """How many images two parts share, for the three pairs of parts. All zero means no leak."""
    seen = {part: set(digest_images(task.load_samples(part).images[:])) for part in PARTS}
    return {(a, b): len(seen[a] & seen[b]) for a, b in combinations(PARTS, 2)}
