"""Resize windows of pictures with Triton's kernels on a GPU. Importing this needs Triton.

Computes what `crops.resize` does, directly from the packed bytes. Pictures are not padded to one size, and only
the few pixels near a position are read.

Legend: n pictures; a plane is one color of one; a position is a row or column of a picture.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TABLE = tl.constexpr(8)
"""Numbers a picture: where it starts, its height and width, its window's top, left, height, width; mirrored."""


@triton.jit
def _weigh(distance):  # type: ignore[no-untyped-def]
    """Bicubic, a = -1/2."""
    x = tl.abs(distance)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return tl.where(x < 1, near, tl.where(x < 2, far, 0.0))


@triton.jit
def _resize_rows(pixels, table, half, side, highest, taps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    about = table + (plane // 3) * _TABLE
    height, width = tl.load(about + 1), tl.load(about + 2)
    top, left = tl.load(about + 3), tl.load(about + 4)
    rows, columns = tl.load(about + 5), tl.load(about + 6)
    if row < rows:
        line = pixels + tl.load(about) + ((plane % 3) * height + top + row) * width + left
        column = tl.arange(0, BLOCK)
        x = tl.minimum(column, side - 1)
        x = tl.where(tl.load(about + 7) != 0, side - 1 - x, x)
        scale = columns.to(tl.float32) / side
        wide = tl.maximum(scale, 1.0)
        center = (x.to(tl.float32) + 0.5) * scale
        first = tl.floor(center - 2 * wide - 0.5).to(tl.int32)
        sum_of_weights = tl.full([BLOCK], 0.0, tl.float32)
        result = tl.full([BLOCK], 0.0, tl.float32)
        for step in range(taps):
            position = first + step
            inside = (position >= 0) & (position < columns)
            weight = tl.where(inside, _weigh((position.to(tl.float32) + 0.5 - center) / wide), 0.0)
            result += weight * tl.load(line + position, mask=inside, other=0).to(tl.float32)
            sum_of_weights += weight
        kept = tl.floor(result / sum_of_weights + 0.5)  # as Pillow keeps it
        kept = tl.minimum(tl.maximum(kept, 0.0), 255.0).to(tl.uint8)
        tl.store(half + (plane * highest + row) * side + column, kept, mask=column < side)


@triton.jit
def _resize_columns(half, table, out, side, highest, taps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tl.load(table + (plane // 3) * _TABLE + 5).to(tl.int32)
    column = tl.arange(0, BLOCK)
    scale = rows.to(tl.float32) / side
    wide = tl.maximum(scale, 1.0)
    center = (row.to(tl.float32) + 0.5) * scale
    first = tl.floor(center - 2 * wide - 0.5).to(tl.int32)
    sum_of_weights = 0.0
    result = tl.full([BLOCK], 0.0, tl.float32)
    for step in range(taps):
        position = first + step
        inside = (position >= 0) & (position < rows)
        weight = tl.where(inside, _weigh((position.to(tl.float32) + 0.5 - center) / wide), 0.0)
        line = half + (plane * highest + position) * side
        result += weight * tl.load(line + column, mask=inside & (column < side), other=0).to(tl.float32)
        sum_of_weights += weight
    result = tl.minimum(tl.maximum(result / sum_of_weights, 0.0), 255.0)
    tl.store(out + (plane * side + row) * side + column, result, mask=column < side)


def resize_packed(pixels: Tensor, sizes: Tensor, boxes: Tensor, side: int, flips: Tensor | None) -> Tensor:
    """Resize a window of each picture to a square: float32 `[n, 3, side, side]` in [0, 255].

    Args:
        pixels: uint8 `[bytes]` on a GPU, picture after picture, each `[3, H, W]`.
        sizes: int64 `[n, 2]`, heights and widths, on the CPU.
        boxes: int64 `[n, 4]`, one window (top, left, height, width) inside each picture, on the CPU.
        flips: bool `[n]`, the windows to mirror, on the CPU; None mirrors none.
    """
    ends = (3 * sizes.prod(1)).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    mirrored = torch.zeros_like(starts) if flips is None else flips.long()
    table = torch.cat([starts[:, None], sizes, boxes, mirrored[:, None]], 1)
    table = table.to(pixels.device, non_blocking=True)
    planes, highest = 3 * len(sizes), int(boxes[:, 2].max())
    half = torch.empty(planes, highest, side, dtype=torch.uint8, device=pixels.device)
    out = torch.empty(len(sizes), 3, side, side, device=pixels.device)
    block = triton.next_power_of_2(side)
    taps = int(4 * max(1.0, int(boxes[:, 2:].max()) / side)) + 3  # as many as the largest window needs
    with torch.cuda.device_of(pixels):
        _resize_rows[(highest, planes)](pixels, table, half, side, highest, taps, BLOCK=block)
        _resize_columns[(side, planes)](half, table, out, side, highest, taps, BLOCK=block)
    return out


def probe() -> None:
    """Resize a picture; raise where kernels cannot be built."""
    pixels = torch.zeros(3 * 20 * 20, dtype=torch.uint8, device="cuda")
    resize_packed(pixels, torch.tensor([[20, 20]]), torch.tensor([[0, 0, 20, 20]]), 16, None)
