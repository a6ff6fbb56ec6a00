"""Steps that several elementwise methods share: trimming and dropping.

Legend: `T` experts, `*S` a tensor's shape, `n` a flat block's length.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from mergekit_lab.merging.contract import Segment

_Share = TypeVar("_Share")
_Found = TypeVar("_Found")
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that has it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def at_once(work: Callable[[_Share], _Found], shares: Sequence[_Share]) -> list[_Found]:
    """`work` of every share, a thread each: several devices, or cores, count at once."""
    if len(shares) == 1:
        return [work(shares[0])]
    with ThreadPoolExecutor(len(shares), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, shares))


# --- trimming -----------------------------------------------------------------------------------------

Pass = Callable[[], Iterator[Tensor]]


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
            for start, stop, bound in ((0, split, below), (split, size, threshold)):
                if start < stop:
                    # hardshrink zeroes what is within ±bound, and unlike a mask it is vectorised on a CPU
                    torch.hardshrink(deltas[t, start:stop], bound, out=out[t, start:stop])
        return out


def select_largest(shares: Sequence[Pass], kept: int, entries: int, with_ties: bool = False) -> Largest:
    """Find the `kept` entries of largest magnitude of each expert, exactly, in a few passes over blocks.

    A radix selection over the magnitudes' bits: what it holds does not grow with the model, nor with how many
    entries are equal.

    Args:
        shares: each starts a pass over blocks `[T, n]`, all float32 or all float64; several run at once.
            Without `with_ties` there is one share, in flat order.
        kept: 0 or more; as many as there are, or more, keeps everything.
        entries: how many an expert has over all blocks.
        with_ties: keep all entries as large as the last kept one; otherwise those of lowest flat index.
    """
    example = next(shares[0]())
    experts, dtype = len(example), example.dtype
    if kept <= 0:
        return Largest([torch.finfo(dtype).max] * experts, [0.0] * experts, [0.0] * experts)
    if kept >= entries:
        return Largest([0.0] * experts, [math.nextafter(0.0, -1.0)] * experts, [math.inf] * experts)
    prefix, known = [0] * experts, 0
    room = torch.full((experts, 1), kept, device=example.device)
    equal = room
    for width in _widths(dtype, entries):
        counts = torch.zeros(experts, 1 << width, dtype=torch.int64, device=example.device)
        for found in at_once(partial(_count, experts, prefix, known, width), shares):
            counts += found.to(counts.device)
        from_above = counts.flip(1).cumsum(1)
        place = torch.searchsorted(from_above, room)
        digit = counts.shape[1] - 1 - place
        equal = counts.gather(1, digit)
        room = room - (from_above.gather(1, place) - equal)
        prefix = [before << width | each for before, each in zip(prefix, digit[:, 0].tolist(), strict=True)]
        known += width
    thresholds = [float(torch.tensor(bits, dtype=_BITS[dtype]).view(dtype)) for bits in prefix]
    below = [_next_below(threshold, dtype) for threshold in thresholds]
    cuts = [math.inf] * experts
    if not with_ties and not torch.equal(room, equal):
        cuts = _cuts(shares[0], thresholds, room[:, 0].tolist(), equal[:, 0].tolist())
    return Largest(thresholds, below, cuts)


def _count(experts: int, prefix: Sequence[int], known: int, width: int, blocks: Pass) -> Tensor:
    """How often each value of the next `width` bits occurs in a pass, `[T, 2^width]`, on the blocks' device."""
    counts: Tensor | None = None
    for block in blocks():
        if counts is None:
            counts = torch.zeros(experts, 1 << width, dtype=torch.int64, device=block.device)
        for t, row in enumerate(block):
            _count_digits(counts[t], row, prefix[t], known, width)
    assert counts is not None
    return counts


_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_WIDE = 1 << 22
"""Entries from which a pass over them costs more than a million counters."""


def _widths(dtype: torch.dtype, entries: int) -> tuple[int, ...]:
    """Bits that are settled in each pass, the sign left out.

    Few at first: where most numbers share an exponent, many threads of a GPU would count in one place.
    """
    if dtype == torch.float64:
        return (11, 20, 20, 12) if entries > _WIDE else (11, 13, 13, 13, 13)
    return (11, 20) if entries > _WIDE else (11, 10, 10)


def _count_digits(counts: Tensor, row: Tensor, prefix: int, known: int, width: int) -> None:
    """Add to `counts` the next `width` bits of those magnitudes of `row` whose first `known` are `prefix`."""
    kind = _BITS[row.dtype]
    size = torch.iinfo(kind).bits - 1
    bits = _as_array(row.view(kind)) & torch.iinfo(kind).max
    if known == 0:
        counts += torch.bincount(torch.as_tensor(bits >> (size - width)), minlength=len(counts))
        return
    digits = torch.as_tensor(bits[(bits >> (size - known)) == prefix])
    digits = (digits >> (size - known - width)) & (len(counts) - 1)
    counts.scatter_add_(0, digits.long(), counts.new_ones(1).expand(len(digits)))


def _next_below(value: float, dtype: torch.dtype) -> float:
    return float(torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(-math.inf, dtype=dtype)))


def _cuts(blocks: Pass, thresholds: list[float], room: list[int], equal: list[int]) -> list[float]:
    """The flat index from which entries equal to the threshold go, where there is `room` for so many."""
    cuts = [math.inf if places == count else -1.0 for places, count in zip(room, equal, strict=True)]
    left = list(room)
    offset = 0
    for block in blocks():
        for t, row in enumerate(block):
            if cuts[t] < 0:
                places = torch.as_tensor(_as_array(row.abs()) == thresholds[t]).nonzero()[:, 0]
                if len(places) >= left[t]:
                    cuts[t] = offset + int(places[left[t] - 1]) + 1
                left[t] -= len(places)
        if min(cuts) >= 0:
            break
        offset += block.shape[1]
    return cuts


def _as_array(values: Tensor) -> Any:
    """The values as NumPy sees them on a CPU, where it is many times as fast at these; else themselves."""
    return values.numpy() if values.device.type == "cpu" else values


def keep_largest(values: Tensor, kept: int) -> Tensor:
    """Zero all but the `kept` entries of largest magnitude of `[T, *S]`, in each row on its own.

    Of equal magnitudes the lowest flat index stays first.
    """
    rows = values.reshape(len(values), -1)
    return select_largest([lambda: iter([rows])], kept, rows.shape[1]).of(rows).view_as(values)


# --- dropping -----------------------------------------------------------------------------------------


def hash_key(*parts: object) -> int:
    """A 64-bit integer (as int64) that depends on every part and on nothing else."""
    text = "\x1f".join(str(part) for part in parts)
    return _signed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


@dataclass(frozen=True)
class Counters:
    """Entries that draw random numbers: a key, and flat indices from `start` on, of `count` entries.

    SplitMix64 (Steele, Lea & Flood 2014) of key and index in wrapping 64-bit arithmetic: the same bits on
    every device, in any order and any sharding. Several of them stand end to end in a pooled block.
    """

    key: int
    start: int
    count: int


def counters(seed: int, expert: str, segments: Sequence[Segment]) -> list[Counters]:
    """The draws of one expert for a block, from the names and places alone."""
    return [Counters(hash_key(seed, expert, s.name), s.start, s.stop - s.start) for s in segments]


def counter_uniform(draws: Sequence[Counters], device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1), 53 bits each: float64, the counters' entries end to end."""
    return ((_random_bits(draws, device) >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def counter_keep(draws: Sequence[Counters], out: Tensor, drop: float) -> None:
    """Make `out`, which is contiguous, 1 where `counter_uniform` is at least `drop`, else 0."""
    flat = _as_array(out.view(-1))
    bound = _signed((math.ceil(drop * 2.0**53) << 11) ^ (1 << 63))
    first = 0
    for group in ([part] for part in _cache_sized(draws)) if out.device.type == "cpu" else (draws,):
        bits = _as_array(_random_bits(group, out.device))
        bits ^= _signed(1 << 63)  # signed numbers in the order of the unsigned ones
        flat[first : first + len(bits)] = bits >= bound
        first += len(bits)


def pack(keep: Tensor, bits: Tensor, offset: int) -> None:
    """Write zeros and ones on a CPU, `[T, n]`, as bits into uint8 `[T, …]`; 8 divides the flat index."""
    found = numpy.packbits(keep.numpy().astype(bool), axis=1)
    bits.numpy()[:, offset // 8 : offset // 8 + found.shape[1]] = found


def unpacked(bits: Tensor, offset: int, like: Tensor) -> Tensor:
    """What was packed at a flat index, in the shape and dtype of `like`."""
    size = like.shape[1]
    part = bits.numpy()[:, offset // 8 : -(-(offset + size) // 8)]
    return torch.from_numpy(numpy.unpackbits(part, axis=1, count=size)).to(like.dtype)


_CACHE_SIZED = 1 << 17


def _cache_sized(draws: Sequence[Counters]) -> Iterator[Counters]:
    for each in draws:
        for first in range(0, each.count, _CACHE_SIZED):
            yield Counters(each.key, each.start + first, min(_CACHE_SIZED, each.count - first))


@lru_cache(maxsize=1)
def _first_states() -> Tensor:
    return _states(_CACHE_SIZED, torch.device("cpu"))


def _states(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_signed(_GOLDEN_GAMMA))


class _Scratch(threading.local):
    """Memory that a CPU's threads draw random bits in, again and again: new pages cost as much as drawing."""

    def __init__(self) -> None:
        self.rows = torch.empty(2, _CACHE_SIZED, dtype=torch.int64)


_scratch = _Scratch()


def _random_bits(draws: Sequence[Counters], device: torch.device) -> Tensor:
    """SplitMix64's outputs, 64 bits each, as int64; on a CPU valid until this thread draws again."""
    total = sum(each.count for each in draws)
    before, shifts = 0, []
    for each in draws:
        shifts.append(_signed(each.key + (each.start - before) * _GOLDEN_GAMMA))
        before += each.count
    if device.type == "cpu" and len(draws) == 1 and total <= _CACHE_SIZED:
        state, other = _scratch.rows[:, :total]
        torch.add(_first_states()[:total], shifts[0], out=state)
    else:
        lengths = torch.tensor([each.count for each in draws], device=device)
        state = torch.tensor(shifts, device=device).repeat_interleave(lengths, output_size=total)
        state += _states(total, device)
        other = torch.empty_like(state)
    values, spare = _as_array(state), _as_array(other)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        _shift_right(values, shift, spare)
        values ^= spare
        if factor is not None:
            values *= _signed(factor)
    return state


def _shift_right(values: Any, places: int, out: Any) -> None:
    """Zeros come in at the left."""
    if isinstance(values, Tensor):
        torch.bitwise_right_shift(values, places, out=out)
        out &= (1 << (64 - places)) - 1
    else:
        unsigned = numpy.uint64
        numpy.right_shift(values.view(unsigned), unsigned(places), out=out.view(unsigned))


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
