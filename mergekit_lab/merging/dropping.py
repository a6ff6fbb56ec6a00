"""Dropping entries of task vectors at random: masks that are the same on every device, and rescaling.

Legend: `T` experts, `*S` a tensor's shape, `n` a flat block's length.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from mergekit_lab.merging.contract import Segment
from mergekit_lab.merging.kernels import as_array

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that has it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


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
    flat = as_array(out.view(-1))
    bound = _signed((math.ceil(drop * 2.0**53) << 11) ^ (1 << 63))
    first = 0
    for group in ([part] for part in _cache_sized(draws)) if out.device.type == "cpu" else (draws,):
        bits = as_array(_random_bits(group, out.device))
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
    values, spare = as_array(state), as_array(other)
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
