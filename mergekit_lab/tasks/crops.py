"""Random and centered windows of pictures, resized for a whole batch at once.

Windows are drawn as torchvision's `RandomResizedCrop` draws them, and resized as Pillow and `interpolate(…,
antialias=True)` do (bicubic, a = -1/2, widened where pictures shrink). Windows of a batch differ in size, so
each is multiplied from the left and the right by its own matrix, on the pictures' device.

Legend: n pictures; a box is (top, left, height, width) in pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TRIES = 10


def draw_boxes(
    sizes: Tensor,
    generator: torch.Generator,
    scale: tuple[float, float],
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Draw one window per picture, int64 `[n, 4]`.

    Args:
        sizes: int64 `[n, 2]`, heights and widths.
        scale: range of the window's share of the picture's area, drawn uniformly.
        ratio: range of width ÷ height; its logarithm is drawn uniformly. If ten draws do not fit into a
            picture, it gets the largest centered window within the ratios.
    """
    count = len(sizes)
    heights, widths = sizes[:, :1].double(), sizes[:, 1:].double()
    draws = torch.rand(4, count, _TRIES, generator=generator, dtype=torch.float64).to(sizes.device)
    area = heights * widths * (scale[0] + draws[0] * (scale[1] - scale[0]))
    low, high = math.log(ratio[0]), math.log(ratio[1])
    shape = torch.exp(low + draws[1] * (high - low))
    width, height = torch.sqrt(area * shape).round(), torch.sqrt(area / shape).round()
    fits = (width > 0) & (width <= widths) & (height > 0) & (height <= heights)
    first = fits.double().argmax(1, keepdim=True)
    height, width = height.gather(1, first), width.gather(1, first)
    top = (draws[2].gather(1, first) * (heights - height + 1)).floor()
    left = (draws[3].gather(1, first) * (widths - width + 1)).floor()
    boxes = torch.cat([top, left, height, width], 1).long()
    return torch.where(fits.any(1, keepdim=True), boxes, _fit_largest(sizes, ratio))


def _fit_largest(sizes: Tensor, ratio: tuple[float, float]) -> Tensor:
    heights, widths = sizes[:, 0].double(), sizes[:, 1].double()
    width = torch.minimum(widths, (heights * ratio[1]).round())
    height = torch.minimum(heights, (widths / ratio[0]).round())
    return _center(sizes, torch.stack([height, width], 1).long())


def center_boxes(sizes: Tensor) -> Tensor:
    """The largest centered square of each picture, int64 `[n, 4]`."""
    side = sizes.min(1, keepdim=True).values
    return _center(sizes, side.expand(-1, 2))


def _center(sizes: Tensor, windows: Tensor) -> Tensor:
    return torch.cat([torch.div(sizes - windows, 2, rounding_mode="floor"), windows], 1)


def resize(pixels: Tensor, boxes: Tensor, side: int, flips: Tensor | None = None) -> Tensor:
    """Windows of pictures, each resized to a square: float32 `[n, 3, side, side]` in [0, 255], on their device.

    Args:
        pixels: uint8 `[n, 3, H, W]`.
        boxes: int64 `[n, 4]`, one window inside each picture.
        flips: bool `[n]`, the windows to mirror.
    """
    boxes = boxes.to(pixels.device)
    rows = _compute_weights(boxes[:, 0], boxes[:, 2], side, pixels.shape[2])
    columns = _compute_weights(boxes[:, 1], boxes[:, 3], side, pixels.shape[3])
    if flips is not None:
        columns = torch.where(flips.to(pixels.device)[:, None, None], columns.flip(1), columns)
    with torch.autocast(pixels.device.type, enabled=False):
        half = (
            (pixels.float() @ columns.transpose(1, 2).unsqueeze(1)).round_().clamp_(0, 255)
        )  # as Pillow keeps it
        return (rows.unsqueeze(1) @ half).clamp_(0, 255)


def _compute_weights(starts: Tensor, lengths: Tensor, side: int, longest: int) -> Tensor:
    """Bicubic weights `[n, side, longest]` that resize `lengths` pixels from `starts` on; rows sum to 1."""
    scale = (lengths.float() / side)[:, None, None]
    centers = (torch.arange(side, device=lengths.device).float()[None, :, None] + 0.5) * scale
    positions = (torch.arange(longest, device=lengths.device)[None, :] - starts[:, None]).float()[:, None, :]
    x = ((positions + 0.5 - centers) / scale.clamp(min=1)).abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    weights = torch.where((positions >= 0) & (positions < lengths[:, None, None]), weights, 0.0)
    return weights / weights.sum(2, keepdim=True)
