"""An image tower with its preprocessing, named as in open_clip's whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

from mergekit_lab.backbones.attention import keep_differentiable


class ImageEncoder(nn.Module):
    """An image tower with its preprocessing: it maps pictures to unit vectors.

    Parameters and buffers in `state_dict` are named as in open_clip's whole model (`visual.…`), so a
    checkpoint of this module merges with, and loads into, any other of the same architecture.

    core: the submodule that is linearized, which leaves out preprocessing and the features' normalization.
    """

    core: ClassVar[str] = "visual"
    mean: Tensor
    std: Tensor

    def __init__(self, visual: nn.Module, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.visual = visual
        self.size = size
        self.register_buffer("mean", torch.tensor(mean).reshape(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).reshape(3, 1, 1), persistent=False)
        self.eval()

    def train(self, mode: bool = True) -> ImageEncoder:
        """Set the mode as usual, but keep attention differentiable by `torch.func`."""
        super().train(mode)
        keep_differentiable(self)
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Map images, uint8 or float in [0, 1], `[N, 3, H, W]`, to L2-normalized features `[N, D]`.

        Images of another size than the model's are resized (bicubic, antialiased, ignoring the aspect ratio).
        """
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        if images.shape[-2:] != self.size:
            images = interpolate(images, size=self.size, mode="bicubic", antialias=True).clamp(0, 1)
        return normalize(self.visual((images - self.mean) / self.std), dim=-1)
