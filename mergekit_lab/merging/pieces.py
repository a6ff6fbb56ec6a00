"""Steps that several elementwise methods share: trimming and dropping.

Legend: `T` experts, `*S` a tensor's shape, `n` a flat block's length.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Largest:
    """Which entries of each expert are among its largest in magnitude.

    Those above the threshold, and those equal to it at flat indices below the cut.

    Attributes:
        thresholds: one an expert, exact in the task vectors' dtype.
        below: the next smaller number of that dtype.
        cuts: one an expert; infinite keeps all equal ones.
    """

    thresholds: list[float]
    below: list[float]
    cuts: list[float]

    def of(self, deltas: Tensor, offset: int = 0) -> Tensor:
        """The block `[T, n]` that starts at a flat index, with all other entries zero."""
        out = torch.empty_like(deltas)
        size = deltas.shape[1]
        for t, (threshold, below, cut) in enumerate(zip(self.thresholds, self.below, self.cuts, strict=True)):
            split = int(min(max(cut - offset, 0), size))
            for part, bound in ((slice(0, split), below), (slice(split, size), threshold)):
                # hardshrink zeroes what is within ±bound, and unlike a mask it is vectorised on a CPU
                torch.hardshrink(deltas[t, part], bound, out=out[t, part])
        return out


def select_largest(blocks: Callable[[], Iterator[Tensor]], kept: int, with_ties: bool = False) -> Largest:
    """Find the `kept` entries of largest magnitude of each expert, exactly, without keeping any block.

    A radix selection on the bits of the floats: the order of non-negative floats is the order of their
    bit patterns, so each pass fixes the next 16 bits with a histogram.

    Args:
        blocks: starts a pass over blocks `[T, n]`, all float32 or all float64, in flat order.
        kept: 0 or more; as many as there are, or more, keeps everything.
        with_ties: keep all entries as large as the last kept one; otherwise those of lowest flat index.
    """
    remaining, prefix, shift = torch.tensor(0), torch.tensor(0), 1
    dtype, first = torch.float32, True
    while shift > 0:
        counts, shift, dtype = _histogram(blocks, prefix, None if first else shift)
        if first:
            experts = len(counts)
            if kept <= 0:
                return Largest([torch.finfo(dtype).max] * experts, [0.0] * experts, [0.0] * experts)
            if kept >= int(counts[0].sum()):
                return Largest([0.0] * experts, [math.nextafter(0.0, -1.0)] * experts, [math.inf] * experts)
            remaining = torch.full((len(counts),), kept)
            prefix, first = torch.zeros(len(counts), dtype=torch.int64), False
        from_top = counts.flip(1).cumsum(1)
        place = (from_top < remaining[:, None]).sum(1)
        above = from_top.gather(1, (place - 1).clamp(min=0)[:, None])[:, 0]
        remaining = remaining - torch.where(place > 0, above, 0)
        prefix = (prefix << _DIGIT) | ((1 << _DIGIT) - 1 - place)
    equal = counts.gather(1, (prefix & ((1 << _DIGIT) - 1))[:, None])[:, 0]
    thresholds = prefix.to(torch.int32).view(dtype) if dtype == torch.float32 else prefix.view(dtype)
    below = torch.nextafter(thresholds, torch.tensor(-1.0, dtype=dtype))
    if with_ties or bool((equal == remaining).all()):
        cuts = [math.inf] * len(thresholds)
    else:
        cuts = _cuts(blocks, thresholds, remaining.tolist(), (equal == remaining).tolist())
    return Largest(thresholds.tolist(), below.tolist(), cuts)


_DIGIT = 16


def _histogram(
    blocks: Callable[[], Iterator[Tensor]], prefix: Tensor, shift: int | None
) -> tuple[Tensor, int, torch.dtype]:
    """Counts `[T, 2^16]` of the digit below `shift` (None: the top one) among entries that begin so."""
    totals: list[Tensor] = []
    dtype, lower = torch.float32, 0
    for block in blocks():
        dtype = block.dtype
        narrow = dtype == torch.float32
        lower = (32 if narrow else 64) - _DIGIT if shift is None else shift - _DIGIT
        digits = block.abs().view(torch.int32 if narrow else torch.int64) >> lower
        if shift is not None:
            # digits of other prefixes fall into two bins outside, which is faster than selecting
            first = (prefix << _DIGIT).to(digits).view(-1, 1)
            digits = digits.sub_(first).clamp_(-1, 1 << _DIGIT)
        digits = digits.add_(1)
        found = [torch.bincount(row, minlength=(1 << _DIGIT) + 2)[1 : (1 << _DIGIT) + 1] for row in digits]
        totals = totals or [torch.zeros_like(count) for count in found]
        for total, count in zip(totals, found, strict=True):
            total += count
    return torch.stack(totals).cpu(), lower, dtype


def _cuts(
    blocks: Callable[[], Iterator[Tensor]], thresholds: Tensor, room: list[int], open_end: list[bool]
) -> list[float]:
    """The flat index from which entries equal to the threshold go, for each expert."""
    cuts = [math.inf if free else -1.0 for free in open_end]
    offset = 0
    for block in blocks():
        for t, row in enumerate(block):
            if cuts[t] < 0:
                places = (row.abs() == thresholds[t].to(row)).nonzero()[:, 0]
                if len(places) >= room[t]:
                    cuts[t] = offset + int(places[room[t] - 1]) + 1
                room[t] -= len(places)
        if min(cuts) >= 0:
            break
        offset += block.shape[1]
    return cuts


def keep_largest(values: Tensor, kept: int) -> Tensor:
    """Zero all but the `kept` entries of largest magnitude of `[T, *S]`, in each row on its own.

    Of equal magnitudes the lowest flat index stays first.
    """
    rows = values.reshape(len(values), -1)
    return select_largest(lambda: iter([rows]), kept).of(rows).view_as(values)


# --- dropping -----------------------------------------------------------------------------------------


def hash_key(*parts: object) -> int:
    """A 64-bit integer (as int64) that depends on every part and on nothing else."""
    text = "\x1f".join(str(part) for part in parts)
    return _signed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def counter_uniform(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1), 53 bits each, at the flat indices from `start` on: float64 `[count]`.

    See `counter_keep`.
    """
    return _counter_bits(key, start, count, device).to(torch.float64) * 2.0**-53


def counter_keep(key: int, start: int, like: Tensor, drop: float) -> Tensor:
    """1 where `counter_uniform` is at least `drop`, else 0, for each entry of `like`, in its shape and dtype.

    SplitMix64 (Steele, Lea & Flood 2014) of `key` and the flat index in wrapping int64 arithmetic: the same
    bits on every device, in any order and any sharding.
    """
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    flat = out.view(-1)
    bound = math.ceil(drop * 2.0**53)
    step = _HASH_BLOCK if like.device.type == "cpu" else max(1, flat.numel())
    for first in range(0, flat.numel(), step):
        part = flat[first : first + step]
        bits = _counter_bits(key, start + first, part.numel(), like.device)
        part.copy_(bits.sub_(bound).bitwise_right_shift_(63)).add_(1)  # −1 or 0, then 0 or 1
    return out


_HASH_BLOCK = 1 << 15


def _counter_bits(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """The upper 53 bits of SplitMix64's outputs as non-negative int64 `[count]`."""
    state = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    spare = torch.empty_like(state)
    state.mul_(_signed(_GOLDEN_GAMMA)).add_(key)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        torch.bitwise_right_shift(state, shift, out=spare)
        state.bitwise_xor_(spare.bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            state.mul_(_signed(factor))
    return state.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)


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
