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


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    out, before, bound, entries,
    GAMMA: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    state = (place + 1) * GAMMA + before
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * MIX_1  # masks, because zeros come in at the left
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * MIX_2
    state = state ^ ((state >> 31) & 0x1FFFFFFFF)
    if KEEP:
        flipped = state ^ -0x8000000000000000  # signed numbers in the order of the unsigned ones
        tl.store(out + place, (flipped >= bound).to(tl.uint8), mask=place < entries)
    else:
        uniform = ((state >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
        tl.store(out + place, uniform, mask=place < entries)


def draw(out: Tensor, state: int, bound: int, factors: tuple[int, int, int]) -> None:
    """SplitMix64's outputs for states `state` + γ, `state` + 2γ, …: see `dropping.Counters`.

    Args:
        out: flat and contiguous. float64: becomes uniform in [0, 1), 53 bits each. bool: becomes whether the
            64 bits, their first one flipped, are at least `bound` as signed numbers.
        state, bound: int64.
        factors: γ and the two multipliers, as int64.
    """
    gamma, mix_1, mix_2 = factors
    keep = out.dtype == torch.bool
    with torch.cuda.device_of(out):
        _draw[(triton.cdiv(len(out), _BLOCK),)](
            out.view(torch.uint8) if keep else out, state, bound, len(out),
            GAMMA=gamma, MIX_1=mix_1, MIX_2=mix_2, KEEP=keep, BLOCK=_BLOCK,
        )  # fmt: skip
