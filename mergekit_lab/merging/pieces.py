"""Steps that several elementwise methods share: trimming and dropping.

Legend: `T` experts, `*S` a tensor's shape, `n` a flat block's length.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
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


def select_largest(
    blocks: Callable[[], Iterator[Tensor]], kept: int, entries: int, with_ties: bool = False
) -> Largest:
    """Find the `kept` entries of largest magnitude of each expert, exactly, in a few passes over blocks.

    A sample brackets the smallest kept magnitude; one pass counts what lies above the bracket and collects
    the few percent inside, among which the answer is. A bracket that missed is moved, and the pass repeated.

    Args:
        blocks: starts a pass over blocks `[T, n]`, all float32 or all float64, in flat order.
        kept: 0 or more; as many as there are, or more, keeps everything.
        entries: how many an expert has over all blocks.
        with_ties: keep all entries as large as the last kept one; otherwise those of lowest flat index.
    """
    example = next(blocks())
    experts, dtype = len(example), example.dtype
    if kept <= 0:
        return Largest([torch.finfo(dtype).max] * experts, [0.0] * experts, [0.0] * experts)
    if kept >= entries:
        return Largest([0.0] * experts, [math.nextafter(0.0, -1.0)] * experts, [math.inf] * experts)
    low, high = _bracket(blocks, kept, entries, dtype)
    while True:
        above, inside = _count_and_collect(blocks, low, high)
        missed = False
        for t in range(experts):
            if kept <= above[t]:
                low[t], high[t], missed = _next(high[t], dtype, up=True), math.inf, True
            elif kept > above[t] + inside[t].count:
                low[t], high[t], missed = 0.0, _next(low[t], dtype, up=False), True
        if not missed:
            break
    rows = [inside[t].largest(kept - above[t]) for t in range(experts)]
    thresholds = [threshold for threshold, _, _ in rows]
    below = [_next(threshold, dtype, up=False) for threshold in thresholds]
    cuts = [math.inf] * experts
    if not with_ties and any(room < equal for _, room, equal in rows):
        cuts = _cuts(blocks, thresholds, rows)
    return Largest(thresholds, below, cuts)


_SAMPLE = 1 << 16
_STANDARD_ERRORS = 6


def _next(value: float, dtype: torch.dtype, up: bool) -> float:
    towards = torch.tensor(math.inf if up else -math.inf, dtype=dtype)
    return float(torch.nextafter(torch.tensor(value, dtype=dtype), towards))


def _bracket(
    blocks: Callable[[], Iterator[Tensor]], kept: int, entries: int, dtype: torch.dtype
) -> tuple[list[float], list[float]]:
    """Magnitudes between which the `kept`-th largest lies, but for a chance of about 1e-9, from a sample."""
    stride = -(-entries // _SAMPLE)
    sample = torch.cat([block[:, ::stride].abs() for block in blocks()], dim=1)
    size = sample.shape[1]
    share = 1 - kept / entries
    slack = _STANDARD_ERRORS * math.sqrt(share * (1 - share) / size) + 2 / size
    places = [math.floor((share - slack) * size), math.ceil((share + slack) * size)]
    low = sample.kthvalue(places[0] + 1).values.tolist() if places[0] >= 0 else [0.0] * len(sample)
    high = sample.kthvalue(places[1] + 1).values.tolist() if places[1] < size else [math.inf] * len(sample)
    return low, high


@dataclass
class _Inside:
    """Magnitudes within a closed bracket; only counted where its ends are one number."""

    low: float
    high: float
    count: int = 0
    values: list[Tensor] = field(default_factory=list)

    def largest(self, kept: int) -> tuple[float, int, int]:
        """The `kept`-th largest, how many equal to it are kept, and how many equal to it there are."""
        if self.low == self.high:
            return self.low, kept, self.count
        values = torch.cat(self.values)
        place = len(values) - kept
        # CUDA's kthvalue takes longer than its sort, a CPU's far less
        threshold = values.sort().values[place] if values.is_cuda else values.kthvalue(place + 1).values
        room = kept - int((values > threshold).sum())
        return float(threshold), room, int((values == threshold).sum())


def _count_and_collect(
    blocks: Callable[[], Iterator[Tensor]], low: list[float], high: list[float]
) -> tuple[list[int], list[_Inside]]:
    """How many magnitudes lie above each bracket, and those inside."""
    above = [0] * len(low)
    inside = [_Inside(a, b) for a, b in zip(low, high, strict=True)]
    for block in blocks():
        for t, row in enumerate(block):
            magnitude = _masks(row.abs())
            above[t] += _count(magnitude > high[t])
            within = (magnitude >= low[t]) & (magnitude <= high[t])
            inside[t].count += _count(within)
            if low[t] < high[t]:
                inside[t].values.append(torch.as_tensor(magnitude[within]))
    return above, inside


def _cuts(
    blocks: Callable[[], Iterator[Tensor]], thresholds: list[float], rows: list[tuple[float, int, int]]
) -> list[float]:
    """The flat index from which entries equal to the threshold go, for each expert."""
    cuts = [math.inf if room == equal else -1.0 for _, room, equal in rows]
    left = [room for _, room, _ in rows]
    offset = 0
    for block in blocks():
        for t, row in enumerate(block):
            if cuts[t] < 0:
                equal = _masks(row.abs()) == thresholds[t]
                count = _count(equal)
                if count >= left[t]:
                    cuts[t] = offset + int(torch.as_tensor(equal).nonzero()[left[t] - 1, 0]) + 1
                left[t] -= count
        if min(cuts) >= 0:
            break
        offset += block.shape[1]
    return cuts


def _masks(values: Tensor) -> Any:
    """The values as NumPy sees them on a CPU, where its comparisons are ten times torch's; else themselves."""
    return values.numpy() if values.device.type == "cpu" else values


def _count(mask: Any) -> int:
    return int(mask.sum()) if isinstance(mask, Tensor) else int(numpy.count_nonzero(mask))


def keep_largest(values: Tensor, kept: int) -> Tensor:
    """Zero all but the `kept` entries of largest magnitude of `[T, *S]`, in each row on its own.

    Of equal magnitudes the lowest flat index stays first.
    """
    rows = values.reshape(len(values), -1)
    return select_largest(lambda: iter([rows]), kept, rows.shape[1]).of(rows).view_as(values)


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
