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
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counted = entry < entries
    bits = tl.load(values + row * stride + entry, mask=counted, other=0) & 0x7FFFFFFF
    if KNOWN > 0:
        counted = counted & ((bits >> (31 - KNOWN)) == tl.load(prefixes + row))
    digits = (bits >> (31 - KNOWN - WIDTH)) & ((1 << WIDTH) - 1)
    counter = ((row * COPIES + entry % COPIES) << WIDTH) + digits
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


@triton.jit(do_not_specialize=("key_stride", "start", "bound", "entries"))
def _draw(  # type: ignore[no-untyped-def]
    out, stride, keys, key_stride, start, bound, entries,
    GAMMA: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = entry + start
    state = ((index >> 1) + 1) * GAMMA + tl.load(keys + row * key_stride)
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * MIX_1  # masks, because zeros come in at the left
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * MIX_2
    state = state ^ ((state >> 31) & 0x1FFFFFFFF)
    bits = (state >> ((index & 1) * 32)) & 0xFFFFFFFF
    target = out + row * stride + entry
    if KEEP:
        tl.store(target, (bits >= bound).to(tl.uint8), mask=entry < entries)
    else:
        tl.store(target, bits.to(tl.float64) * 2.3283064365386963e-10, mask=entry < entries)


def draw(out: Tensor, keys: Tensor, start: int, bound: int, factors: tuple[int, int, int]) -> None:
    """The 32 bits of the entries from `start` on, in rows of a key each: see `dropping.Counters`.

    Args:
        out: `[T, n]`, rows contiguous. float64: becomes the bits over 2³². bool: becomes whether they are at
            least `bound`.
        keys: `[T]`, int64.
        start, bound: at least 0; `bound` has 32 bits.
        factors: SplitMix64's γ and its two multipliers, as int64.
    """
    gamma, mix_1, mix_2 = factors
    rows, entries = out.shape
    keep = out.dtype == torch.bool
    with torch.cuda.device_of(out):
        _draw[(triton.cdiv(entries, _BLOCK), rows)](
            out.view(torch.uint8) if keep else out, out.stride(0), keys, keys.stride(0), start, bound, entries,
            GAMMA=gamma, MIX_1=mix_1, MIX_2=mix_2, KEEP=keep, BLOCK=_BLOCK,
        )  # fmt: skip


def probe() -> None:
    """Count a number's digits; raise where kernels cannot be built."""
    counts = torch.zeros(1, 1, 2, dtype=torch.int64, device="cuda")
    count_digits(torch.ones(1, 1, device="cuda"), counts[0, 0, :1], counts, 0, 1)
