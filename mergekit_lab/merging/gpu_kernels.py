"""Kernels in Triton, for GPUs; importing this needs Triton, which PyTorch for CUDA brings along.

Legend: `T` experts, `n` a flat block's length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    values, stride, entries, prefixes, counts,
    KNOWN: tl.constexpr, WIDTH: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counted = place < entries
    bits = tl.load(values + row * stride + place, mask=counted, other=0) & 0x7FFFFFFF
    if KNOWN > 0:
        counted = counted & ((bits >> (31 - KNOWN)) == tl.load(prefixes + row))
    digits = (bits >> (31 - KNOWN - WIDTH)) & ((1 << WIDTH) - 1)
    counter = ((row * COPIES + place % COPIES) << WIDTH) + digits
    tl.atomic_add(counts + counter, tl.full([BLOCK], 1, tl.int64), mask=counted, sem="relaxed")


def count_digits(block: Tensor, prefix: Tensor, counts: Tensor, known: int, width: int) -> None:
    """Count the next `width` bits of those magnitudes whose first `known` bits are the row's prefix.

    Args:
        block: `[T, n]`, float32, rows contiguous.
        prefix: `[T]`, int64.
        counts: `[T, copies, 2^width]`, int64, contiguous; which copy an entry counts in does not matter.
        known: bits of the prefix; 0 counts all.
        width: bits of the digit.
    """
    experts, entries = block.shape
    with torch.cuda.device_of(block):
        _count[(triton.cdiv(entries, _BLOCK), experts)](
            block.view(torch.int32), block.stride(0), entries, prefix, counts,
            KNOWN=known, WIDTH=width, COPIES=counts.shape[1], BLOCK=_BLOCK,
        )  # fmt: skip
