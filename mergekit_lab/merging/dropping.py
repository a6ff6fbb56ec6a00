"""Drop entries of task vectors at random, with masks that are the same on every device.

Legend: `T` experts, `*S` a tensor's shape, `n` a flat block's length.
"""

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
from mergekit_lab.merging.kernels import load_gpu_kernels

logger = logging.getLogger(__name__)

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _to_signed(value: int) -> int:
    """Reinterpret 64 bits as an int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def hash_key(*parts: object) -> int:
    """A 64-bit integer (as int64) that depends on every part and on nothing else."""
    text = "\x1f".join(str(part) for part in parts)
    return _to_signed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


@dataclass(frozen=True)
class Counters:
    """Entries that draw random numbers: a key, and flat indices from `start` on, of `count` entries.

    32 bits each: entries 2k and 2k + 1 have the lower and the upper half of the output k of SplitMix64 (Steele,
    Lea & Flood 2014) from the key, in wrapping 64-bit arithmetic: the same bits on every device, in any order
    and any sharding. A pooled block has several of them, end to end.
    """

    key: int
    start: int
    count: int


def make_counters(seed: int, expert: str, segments: Sequence[Segment]) -> list[Counters]:
    """The draws of one expert for a block, only from names and ranges."""
    return [Counters(hash_key(seed, expert, s.name), s.start, s.stop - s.start) for s in segments]


def draw_uniform(draws: Sequence[Counters], device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1), 32 bits each: float64, the counters' entries end to end."""
    out = torch.empty(sum(each.count for each in draws), dtype=torch.float64, device=device)
    if device.type == "cpu":
        for part, bits in draw_bits_in_cache(draws):
            numpy.multiply(bits, 2.0**-32, out=out.numpy()[part])
    elif not _draw_by_kernel([draws], out[None], 0):
        out.copy_(to_uniform(draw_bits(draws, device)))
    return out


def to_uniform(bits: Tensor) -> Tensor:
    """Convert 32 bits to a number in [0, 1), in float64; torch would compute in float32."""
    return bits.double().mul_(2.0**-32)


def draw_mask(draws: Sequence[Sequence[Counters]], out: Tensor, drop: float) -> None:
    """Make rows true where `draw_uniform` of the row's counters is at least `drop`.

    Args:
        draws: of each row; starts and counts are the same for all.
        out: `[T, *S]`, boolean, contiguous.
        drop: in [0, 1).
    """
    rows, bound = out.view(len(draws), -1), math.ceil(drop * 2.0**32)
    if bound == 1 << 32:  # more than any number of 32 bits
        rows.zero_()
    elif out.device.type == "cpu":
        for each, row in zip(draws, rows.numpy(), strict=True):
            for part, bits in draw_bits_in_cache(each):
                numpy.greater_equal(bits, numpy.uint32(bound), out=row[part])
    elif not _draw_by_kernel(draws, rows, bound):
        for each, kept in zip(draws, rows, strict=True):
            torch.ge(draw_bits(each, out.device), bound, out=kept)


def apply_mask(values: Tensor, keep: Tensor, out: Tensor) -> Tensor:
    """Write `values · keep` into `out`, which may be `values`; `keep` is boolean.

    A CPU does it with NumPy, which makes numbers of a few booleans at a time, where torch makes them of all.
    """
    if values.device.type != "cpu":
        return torch.mul(values, keep, out=out)
    with numpy.errstate(all="ignore"):  # whoever asks for finite inputs looks at the result
        numpy.multiply(values.numpy(), keep.numpy(), out=out.numpy())
    return out


def pack_mask(keep: Tensor, bits: Tensor, offset: int) -> None:
    """Write booleans on a CPU, `[T, n]`, as bits into uint8 `[T, …]`; 8 divides the flat index."""
    packed = numpy.packbits(keep.numpy(), axis=1)
    bits.numpy()[:, offset // 8 : offset // 8 + packed.shape[1]] = packed


def apply_packed(deltas: Tensor, bits: Tensor, offset: int, factors: Tensor) -> Tensor:
    """`deltas` `[T, n]` times `factors` `[T]` where what was packed at their flat index is true, else 0."""
    out = torch.empty_like(deltas)
    size = deltas.shape[1]
    whole = size // 8
    part = bits.numpy()[:, offset // 8 : -(-(offset + size) // 8)]
    bytes_ = numpy.unpackbits(numpy.arange(256, dtype=numpy.uint8)[:, None], axis=1)
    rows = zip(out.numpy(), deltas.numpy(), part, factors.to(deltas).numpy(), strict=True)
    for row, delta, packed, factor in rows:
        with numpy.errstate(all="ignore"):  # as in `apply_mask`
            table = bytes_ * factor
            numpy.take(table, packed[:whole], axis=0, out=row[: 8 * whole].reshape(-1, 8), mode="clip")
            if size % 8:
                row[8 * whole :] = table[packed[whole], : size % 8]
            numpy.multiply(row, delta, out=row)
    return out


CACHED_OUTPUTS = 1 << 15
"""Outputs that a CPU computes at a time: three times so many 64-bit numbers stay in a core's own cache."""
_ROUNDS = ((30, _MIX_1), (27, _MIX_2), (31, None))
"""SplitMix64's: how far a state is shifted before it is combined with itself, and what it is multiplied by."""


@lru_cache(maxsize=1)
def _make_states() -> Any:
    return numpy.arange(1, CACHED_OUTPUTS + 1, dtype=numpy.uint64) * numpy.uint64(_GOLDEN_GAMMA)


class _Scratch(threading.local):
    """Memory that a CPU's threads draw random bits in, again and again: new pages cost as much as drawing."""

    def __init__(self) -> None:
        self.state, self.other = numpy.empty((2, CACHED_OUTPUTS), dtype=numpy.uint64)


_scratch = _Scratch()


def draw_bits_in_cache(draws: Sequence[Counters]) -> Iterator[tuple[slice, Any]]:
    """The bits of entries on a CPU, as NumPy's uint32, and which of all they are; valid until the next."""
    first = 0
    for each in draws:
        stop = each.start + each.count
        for output in range(each.start // 2, -(-stop // 2), CACHED_OUTPUTS):
            count = min(CACHED_OUTPUTS, -(-stop // 2) - output)
            shift = (each.key + output * _GOLDEN_GAMMA) % (1 << 64)
            state, other = _scratch.state[:count], _scratch.other[:count]
            numpy.add(_make_states()[:count], numpy.uint64(shift), out=state)
            for width, factor in _ROUNDS:
                numpy.right_shift(state, numpy.uint64(width), out=other)
                numpy.bitwise_xor(state, other, out=state)
                if factor is not None:
                    numpy.multiply(state, numpy.uint64(factor), out=state)
            halves = state.astype("<u8", copy=False).view("<u4")  # the lower one first
            bits = halves[max(0, each.start - 2 * output) : stop - 2 * output]
            yield slice(first, first + len(bits)), bits
            first += len(bits)


def draw_bits(draws: Sequence[Counters], device: torch.device) -> Tensor:
    """The bits of entries, as int64, by torch's operations."""
    lengths = torch.tensor([each.count for each in draws], device=device)
    total, before = sum(each.count for each in draws), 0
    keys, shifts = [], []
    for each in draws:
        keys.append(_to_signed(each.key))
        shifts.append(each.start - before)
        before += each.count
    index = torch.tensor(shifts, device=device).repeat_interleave(lengths, output_size=total)
    index += torch.arange(total, device=device)
    state = (index >> 1).add_(1).mul_(_to_signed(_GOLDEN_GAMMA))
    state += torch.tensor(keys, device=device).repeat_interleave(lengths, output_size=total)
    other = torch.empty_like(state)
    for width, factor in _ROUNDS:
        torch.bitwise_right_shift(state, width, out=other)
        other &= (1 << (64 - width)) - 1  # zeros come in at the left
        state ^= other
        if factor is not None:
            state *= _to_signed(factor)
    return (state >> (index & 1).mul_(32)) & 0xFFFFFFFF


_FOR_A_KERNEL = 1 << 18
"""Entries of a `Counters` in all rows, in the mean, from which on a kernel for each is worth its start."""


def _draw_by_kernel(draws: Sequence[Sequence[Counters]], out: Tensor, bound: int) -> bool:
    """Fill rows as `gpu_kernels.draw` does, if it can and there are enough entries for it."""
    if out.device.type != "cuda" or out.numel() < _FOR_A_KERNEL * len(draws[0]) or not (draw := _load_draw()):
        return False
    keys = torch.tensor([[_to_signed(each.key) for each in row] for row in draws]).pin_memory()
    keys = keys.to(out.device, non_blocking=True)
    first = 0
    for number, each in enumerate(draws[0]):
        draw(out[:, first : first + each.count], keys[:, number], each.start, bound, FACTORS)
        first += each.count
    return True


FACTORS = (_to_signed(_GOLDEN_GAMMA), _to_signed(_MIX_1), _to_signed(_MIX_2))


@cache
def _load_draw() -> Callable[..., None] | None:
    """`gpu_kernels.draw`, if this machine's compiler makes of it what torch's operations give."""
    kernels = load_gpu_kernels()
    if kernels is None:
        return None
    try:
        few = [[Counters(key, (1 << 40) + 1, 100)] for key in (7, -7)]
        keys = torch.tensor([7, -7], device="cuda")
        keep = torch.empty(2, 100, dtype=torch.bool, device="cuda")
        uniform = torch.empty(2, 100, dtype=torch.float64, device="cuda")
        for out in (keep, uniform):
            kernels.draw(out, keys, few[0][0].start, 1 << 31, FACTORS)
        bits = torch.stack([draw_bits(each, keep.device) for each in few])
        same = torch.equal(keep, bits >= 1 << 31) and torch.equal(uniform, to_uniform(bits))
    except Exception as error:  # the compiler does not know this kernel or this GPU
        logger.warning("drawing without Triton, which is slower: %s: %s", type(error).__name__, error)
        return None
    if not same:
        logger.warning("drawing without Triton, which is slower: its kernel gives different bits here")
    return kernels.draw if same else None


def restore_norm(delta: Tensor, keep: Tensor) -> Tensor:
    """Zero the entries outside `keep`, and scale the others so that the L1 norm stays; 0 if none is kept.

    Args:
        delta: one expert's task vector of one tensor, any shape.
        keep: the same shape, true (or 1) where an entry stays.
    """
    kept = delta * keep
    before, after = delta.abs().sum(), kept.abs().sum()
    return kept * torch.where(after > 0, before / after.where(after > 0, torch.ones_like(after)), after)
