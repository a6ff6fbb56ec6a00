"""A small model and task that tests of several rooms share."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mergekit_lab.backbones import ImageObjective
from mergekit_lab.tasks import ImageSamples, ImageTask, Part


class TinyEncoder(nn.Module):
    """Images `[N, 3, 4, 4]` to features `[N, 8]`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 8))

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images.float() / 255)


def make_tiny_split(count: int, seed: int = 0) -> ImageSamples:
    """Three classes that differ in brightness."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    noise = torch.randint(0, 60, (count, 3, 4, 4), generator=generator)
    return ImageSamples((noise + labels[:, None, None, None] * 90).to(torch.uint8), labels)


@dataclass(frozen=True)
class TinyTask(ImageTask):
    """`tiny_split`s; the validation and test part are drawn by other seeds."""

    name: str = "tiny"
    size: int = 60
    other_size: int = 30
    seed: int = 0

    classes = ("dark", "gray", "light")
    templates = ("{}",)

    def make(self, part: Part) -> ImageSamples:
        if part == "train":
            return make_tiny_split(self.size, self.seed)
        return make_tiny_split(self.other_size, self.seed + {"validation": 9, "test": 10}[part])


def make_tiny_objective(head: Tensor, size: int = 60, other_size: int = 30, seed: int = 0) -> ImageObjective:
    return ImageObjective(TinyTask(size=size, other_size=other_size, seed=seed), head)
