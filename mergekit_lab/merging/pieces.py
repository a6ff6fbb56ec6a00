"""Steps that several elementwise methods share: trimming and dropping.

Legend: `T` experts, `*S` a tensor's shape, `n` a flat block's length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that has it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


# --- trimming -----------------------------------------------------------------------------------------


def keep_largest(values: Tensor, kept: int) -> Tensor:
    """Zero all but the `kept` entries of largest magnitude, in each row on its own.

    Args:
        values: `[T, *S]`; dimension 0 is the row.
        kept: 0 to the number of entries a row. Of equal magnitudes the lowest flat index stays first.
    """
    rows = values.reshape(len(values), -1)
    if kept >= rows.shape[1]:
        return values.clone()
    if kept == 0:
        return torch.zeros_like(values)
    magnitude = rows.abs()
    threshold = magnitude.kthvalue(rows.shape[1] - kept + 1, dim=1, keepdim=True).values
    above = magnitude > threshold
    at = magnitude == threshold
    room = kept - above.sum(dim=1, keepdim=True)
    keep = above | (at & (at.cumsum(dim=1) <= room))
    return (rows * keep).view_as(values)


def kth_largest_magnitudes(blocks: Callable[[], Iterator[Tensor]], kept: int, experts: int) -> Tensor:
    """The `kept`-th largest magnitude of each expert over all blocks, exactly, in a few passes.

    A radix selection on the bits of the floats: the order of non-negative floats is the order of their
    bit patterns, so each pass fixes the next 16 bits with a histogram and no pass keeps a block.

    Args:
        blocks: starts a pass over blocks `[T, n]`, all float32 or all float64.
        kept: 1 to the number of entries.
        experts: `T`.

    Returns:
        `[T]`, in the blocks' dtype, on the CPU.
    """
    prefix = torch.zeros(experts, dtype=torch.int64)
    remaining = torch.full((experts,), kept, dtype=torch.int64)
    shift, dtype = None, torch.float32
    while shift is None or shift > 0:
        counts = torch.zeros(experts, 1 << 16, dtype=torch.int64)
        next_shift = 0
        for block in blocks():
            dtype = block.dtype
            bits = block.abs().view(torch.int32 if dtype == torch.float32 else torch.int64)
            width = 32 if dtype == torch.float32 else 64
            next_shift = width - 16 if shift is None else shift - 16
            for t in range(experts):
                row = bits[t]
                if shift is not None:
                    row = row[(row >> shift) == prefix[t].item()]
                digit = (row >> next_shift) & 0xFFFF
                counts[t] += torch.bincount(digit, minlength=1 << 16).cpu()
        from_top = counts.flip(1).cumsum(1)
        place = (from_top < remaining[:, None]).sum(1)
        remaining -= torch.where(place > 0, from_top.gather(1, (place - 1).clamp(min=0)[:, None])[:, 0], 0)
        prefix = (prefix << 16) | (0xFFFF - place)
        shift = next_shift
    return prefix.to(torch.int32).view(dtype) if dtype == torch.float32 else prefix.view(dtype)


# --- dropping -----------------------------------------------------------------------------------------


def hash_key(*parts: object) -> int:
    """A 64-bit integer (as int64) that depends on every part and on nothing else."""
    text = "\x1f".join(str(part) for part in parts)
    return _signed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def counter_uniform(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1) at the flat indices `start … start + count − 1`, float64 `[count]`.

    SplitMix64 (Steele, Lea & Flood 2014) of `key` and the index in wrapping int64 arithmetic: the same
    bits on every device, in any order and any sharding. 53 random bits each.
    """
    index = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    state = index * _signed(_GOLDEN_GAMMA) + key
    state = (state ^ _logical_shift(state, 30)) * _signed(_MIX_1)
    state = (state ^ _logical_shift(state, 27)) * _signed(_MIX_2)
    state = state ^ _logical_shift(state, 31)
    return _logical_shift(state, 11).to(torch.float64) * 2.0**-53


def _logical_shift(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def drop_and_rescale(delta: Tensor, keep: Tensor, drop: float, rescale: str = "inverse") -> Tensor:
    """Zero the entries outside `keep` and rescale the others.

    Args:
        delta: one expert's task vector of one tensor, any shape.
        keep: the same shape, true (or 1) where an entry stays.
        drop: the probability with which entries were dropped, in [0, 1).
        rescale: `"inverse"` divides by `1 − drop`; `"l1"` restores the L1 norm that `delta` had
            (nothing kept stays zero).
    """
    kept = delta * keep
    if rescale == "inverse":
        return kept / (1 - drop)
    before, after = delta.abs().sum(), kept.abs().sum()
    return kept * torch.where(after > 0, before / after.where(after > 0, torch.ones_like(after)), after)
