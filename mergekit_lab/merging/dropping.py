"""Dropping entries of task vectors at random: masks that are the same on every device, and rescaling.

Legend: `T` experts, `*S` a tensor's shape, `n` a flat block's length.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from mergekit_lab.merging.contract import Segment
from mergekit_lab.merging.kernels import gpu_kernels

logger = logging.getLogger(__name__)

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

    @property
    def state(self) -> int:
        """SplitMix64's state before the first of the entries, as int64."""
        return _signed(self.key + self.start * _GOLDEN_GAMMA)


def counters(seed: int, expert: str, segments: Sequence[Segment]) -> list[Counters]:
    """The draws of one expert for a block, from the names and places alone."""
    return [Counters(hash_key(seed, expert, s.name), s.start, s.stop - s.start) for s in segments]


def counter_uniform(draws: Sequence[Counters], device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1), 53 bits each: float64, the counters' entries end to end."""
    out = torch.empty(sum(each.count for each in draws), dtype=torch.float64, device=device)
    if device.type != "cpu":
        if not _drawn_by_kernel(draws, out, 0):
            bits = (_random_bits(draws, device) >> 11) & ((1 << 53) - 1)
            torch.mul(bits.to(torch.float64), 2.0**-53, out=out)
        return out
    for place, bits in _bits_in_cache(draws):
        numpy.multiply(bits >> numpy.uint64(11), 2.0**-53, out=out.numpy()[place])
    return out


def counter_keep(draws: Sequence[Counters], out: Tensor, drop: float) -> None:
    """Make `out`, which is boolean and contiguous, true where `counter_uniform` is at least `drop`."""
    flat, bound = out.view(-1), math.ceil(drop * 2.0**53) << 11
    if out.device.type == "cpu":
        for place, bits in _bits_in_cache(draws):
            numpy.greater_equal(bits, numpy.uint64(bound), out=flat.numpy()[place])
        return
    bound = _signed(bound ^ (1 << 63))
    if not _drawn_by_kernel(draws, flat, bound):
        bits = _random_bits(draws, out.device)
        bits ^= _signed(1 << 63)  # signed numbers in the order of the unsigned ones
        torch.ge(bits, bound, out=flat)


def masked(values: Tensor, keep: Tensor, out: Tensor) -> Tensor:
    """`values` where the booleans `keep` are true, else 0 times them, in `out`, which may be `values`.

    A CPU does it with NumPy, which makes numbers of a few booleans at a time, where torch makes them of all.
    """
    if values.device.type != "cpu":
        return torch.mul(values, keep, out=out)
    with numpy.errstate(all="ignore"):  # whoever asks for finite inputs looks at the result
        numpy.multiply(values.numpy(), keep.numpy(), out=out.numpy())
    return out


def pack(keep: Tensor, bits: Tensor, offset: int) -> None:
    """Write booleans on a CPU, `[T, n]`, as bits into uint8 `[T, …]`; 8 divides the flat index."""
    found = numpy.packbits(keep.numpy(), axis=1)
    bits.numpy()[:, offset // 8 : offset // 8 + found.shape[1]] = found


def thinned(deltas: Tensor, bits: Tensor, offset: int, factors: Tensor) -> Tensor:
    """`deltas` `[T, n]` times `factors` `[T]` where what was packed at their flat index is true, else 0."""
    out = torch.empty_like(deltas)
    size = deltas.shape[1]
    whole = size // 8
    part = bits.numpy()[:, offset // 8 : -(-(offset + size) // 8)]
    bytes_ = numpy.unpackbits(numpy.arange(256, dtype=numpy.uint8)[:, None], axis=1)
    rows = zip(out.numpy(), deltas.numpy(), part, factors.to(deltas).numpy(), strict=True)
    for row, delta, packed, factor in rows:
        table = bytes_ * factor
        numpy.take(table, packed[:whole], axis=0, out=row[: 8 * whole].reshape(-1, 8), mode="clip")
        if size % 8:
            row[8 * whole :] = table[packed[whole], : size % 8]
        with numpy.errstate(all="ignore"):
            numpy.multiply(row, delta, out=row)
    return out


_IN_CACHE = 1 << 15
"""Entries that a CPU draws at a time: three times so many 64-bit numbers stay in a core's own cache."""
_ROUNDS = ((30, _MIX_1), (27, _MIX_2), (31, None))
"""SplitMix64's: how far a state is shifted before it is combined with itself, and what it is multiplied by."""


@lru_cache(maxsize=1)
def _first_states() -> Any:
    return numpy.arange(1, _IN_CACHE + 1, dtype=numpy.uint64) * numpy.uint64(_GOLDEN_GAMMA)


class _Scratch(threading.local):
    """Memory that a CPU's threads draw random bits in, again and again: new pages cost as much as drawing."""

    def __init__(self) -> None:
        self.state, self.other = numpy.empty((2, _IN_CACHE), dtype=numpy.uint64)


_scratch = _Scratch()


def _bits_in_cache(draws: Sequence[Counters]) -> Iterator[tuple[slice, Any]]:
    """SplitMix64's outputs on a CPU, as NumPy's uint64, and their place among all; valid until the next."""
    first = 0
    for each in draws:
        for start in range(0, each.count, _IN_CACHE):
            count = min(_IN_CACHE, each.count - start)
            shift = (each.key + (each.start + start) * _GOLDEN_GAMMA) % (1 << 64)
            state, other = _scratch.state[:count], _scratch.other[:count]
            numpy.add(_first_states()[:count], numpy.uint64(shift), out=state)
            for places, factor in _ROUNDS:
                numpy.right_shift(state, numpy.uint64(places), out=other)
                numpy.bitwise_xor(state, other, out=state)
                if factor is not None:
                    numpy.multiply(state, numpy.uint64(factor), out=state)
            yield slice(first, first + count), state
            first += count


def _random_bits(draws: Sequence[Counters], device: torch.device) -> Tensor:
    """SplitMix64's outputs, 64 bits each, as int64, by torch's operations."""
    total = sum(each.count for each in draws)
    before, shifts = 0, []
    for each in draws:
        shifts.append(_signed(each.key + (each.start - before) * _GOLDEN_GAMMA))
        before += each.count
    lengths = torch.tensor([each.count for each in draws], device=device)
    state = torch.tensor(shifts, device=device).repeat_interleave(lengths, output_size=total)
    state += torch.arange(1, total + 1, dtype=torch.int64, device=device).mul_(_signed(_GOLDEN_GAMMA))
    other = torch.empty_like(state)
    for places, factor in _ROUNDS:
        torch.bitwise_right_shift(state, places, out=other)
        other &= (1 << (64 - places)) - 1  # zeros come in at the left
        state ^= other
        if factor is not None:
            state *= _signed(factor)
    return state


_FOR_A_KERNEL = 1 << 15
"""Entries of a `Counters`, in the mean, from which on a kernel for each is worth its start."""


def _drawn_by_kernel(draws: Sequence[Counters], out: Tensor, bound: int) -> bool:
    """Fill `out` as `gpu_kernels.draw` does, if it can and there are enough entries for it."""
    if out.device.type != "cuda" or len(out) < _FOR_A_KERNEL * len(draws) or not (draw := _gpu_draw()):
        return False
    first = 0
    for each in draws:
        draw(out[first : first + each.count], each.state, bound, _FACTORS)
        first += each.count
    return True


_FACTORS = (_signed(_GOLDEN_GAMMA), _signed(_MIX_1), _signed(_MIX_2))


@cache
def _gpu_draw() -> Callable[..., None] | None:
    """`gpu_kernels.draw`, if this machine's compiler makes of it what torch's operations give."""
    found = gpu_kernels()
    if found is None:
        return None
    try:
        few = Counters(7, 1 << 40, 100)
        keep = torch.empty(100, dtype=torch.bool, device="cuda")
        uniform = torch.empty(100, dtype=torch.float64, device="cuda")
        found.draw(keep, few.state, 11, _FACTORS)
        found.draw(uniform, few.state, 11, _FACTORS)
        bits = _random_bits([few], keep.device)
        same = torch.equal(keep, bits ^ _signed(1 << 63) >= 11)
        same &= torch.equal(uniform, ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53)
    except Exception as error:  # the compiler does not know this kernel or this GPU
        logger.warning("drawing without Triton, which is slower: %s: %s", type(error).__name__, error)
        return None
    if not same:
        logger.warning("drawing without Triton, which is slower: its kernel gives other bits here")
    return found.draw if same else None


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
