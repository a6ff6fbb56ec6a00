"""Trimming task vectors: their entries of largest magnitude, found exactly in passes over blocks.

Legend: `T` experts, `*S` a tensor's shape, `n` a flat block's length.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from mergekit_lab.merging.kernels import BITS, DigitCounts, to_array


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

    def trim(self, deltas: Tensor, offset: int = 0) -> Tensor:
        """The block `[T, n]` that starts at a flat index, with all other entries zero."""
        out = torch.empty_like(deltas)
        size = deltas.shape[1]
        for t, (threshold, below, cut) in enumerate(zip(self.thresholds, self.below, self.cuts, strict=True)):
            split = int(min(max(cut - offset, 0), size))
            for start, stop, bound in ((0, split, below), (split, size, threshold)):
                if start < stop:
                    # hardshrink zeroes what is within ±bound, and unlike a mask it is vectorized on a CPU
                    torch.hardshrink(deltas[t, start:stop], bound, out=out[t, start:stop])
        return out


Pass = Callable[[], Iterator[tuple[Any, Tensor, Any]]]
"""Starts a pass over blocks, with `[T, n]` second: `Stream.read_blocks`, or the `Blocks` of one tensor."""
_Share = TypeVar("_Share")
_Result = TypeVar("_Result")


def run_at_once(work: Callable[[_Share], _Result], shares: Sequence[_Share]) -> list[_Result]:
    """`work` of every share, a thread each: several devices, or cores, count at once."""
    if len(shares) == 1:
        return [work(shares[0])]
    with ThreadPoolExecutor(len(shares), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, shares))


def select_largest(shares: Sequence[Pass], kept: int, entries: int, with_ties: bool = False) -> Largest:
    """Find the `kept` entries of largest magnitude of each expert, exactly, in a few passes over blocks.

    A radix selection over the magnitudes' bits: what it holds does not grow with the model, nor with how many
    entries are equal.

    Args:
        shares: passes over blocks, all float32 or all float64; several run at once.
            Without `with_ties` there is one share, in flat order.
        kept: 0 or more; as many as there are, or more, keeps everything.
        entries: how many an expert has over all blocks.
        with_ties: keep all entries as large as the last kept one; otherwise those of lowest flat index.
    """
    return select_each(shares, [kept], entries, with_ties)[0]


def select_each(
    shares: Sequence[Pass], kept: Sequence[int], entries: int, with_ties: bool = False
) -> list[Largest]:
    """`select_largest` for several numbers of entries, in the same passes."""
    _, example, _ = next(shares[0]())
    experts, dtype = len(example), example.dtype
    nothing = Largest([torch.finfo(dtype).max] * experts, [0.0] * experts, [0.0] * experts)
    everything = Largest([0.0] * experts, [math.nextafter(0.0, -1.0)] * experts, [math.inf] * experts)
    sought = [count for count in kept if 0 < count < entries]
    some = iter(_select(shares, sought, entries, with_ties, example) if sought else ())
    return [nothing if count <= 0 else everything if count >= entries else next(some) for count in kept]


def _select(
    shares: Sequence[Pass], kept: Sequence[int], entries: int, with_ties: bool, example: Tensor
) -> list[Largest]:
    """The experts' rows once for each number of entries: `K·T`."""
    experts, dtype, device = len(example), example.dtype, example.device
    room = equal = torch.tensor(kept, device=device).repeat_interleave(experts)[:, None]
    prefix, known = torch.zeros_like(room[:, 0]), 0
    for width in _plan_widths(dtype, entries):
        counted = run_at_once(partial(_count, prefix, known, width), shares)
        counts = reduce(Tensor.add_, (each.to(device) for each in counted))
        from_above = counts.flip(1).cumsum_(1)
        column = torch.searchsorted(from_above, room)
        digit = counts.shape[1] - 1 - column
        equal = counts.gather(1, digit)
        room = room - (from_above.gather(1, column) - equal)
        prefix = prefix << width | digit[:, 0]
        known += width
    # an accelerator is waited for once
    bits, left, alike = torch.stack([prefix, room[:, 0], equal[:, 0]]).cpu()
    exact = bits.to(BITS[dtype]).view(dtype)
    below = torch.nextafter(exact, torch.tensor(-math.inf, dtype=dtype))
    each = zip(*(x.split(experts) for x in (exact, below, left, alike)), strict=True)
    largest = []
    for thresholds, beneath, rooms, equals in each:
        cuts = [math.inf] * experts
        if not with_ties and not torch.equal(rooms, equals):
            cuts = _find_cuts(shares[0], thresholds.tolist(), rooms.tolist(), equals.tolist())
        largest.append(Largest(thresholds.tolist(), beneath.tolist(), cuts))
    return largest


WIDE = 1 << 22
"""Entries from which a pass over them costs more than a million counters."""


def _plan_widths(dtype: torch.dtype, entries: int) -> tuple[int, ...]:
    """Bits that are settled in each pass, the sign left out.

    Few at first: where most numbers share an exponent, many threads of a GPU would count in one counter.
    """
    if dtype == torch.float64:
        return (11, 20, 20, 12) if entries > WIDE else (11, 13, 13, 13, 13)
    return (11, 20) if entries > WIDE else (11, 10, 10)


def _count(prefix: Tensor, known: int, width: int, blocks: Pass) -> Tensor:
    """`DigitCounts.total` of a pass for `prefix` `[K·T]`, on the device of its blocks."""
    digits: list[DigitCounts] = []
    for _, block, _ in blocks():
        if not digits:
            prefixes = prefix.to(block.device).split(len(block))
            digits = [DigitCounts(each, known, width) for each in (prefixes if known else prefixes[:1])]
        for each in digits:
            each.add(block)
    totals = torch.cat([each.compute_total() for each in digits])
    return totals if known else totals.repeat(len(prefix) // len(totals), 1)


def _find_cuts(blocks: Pass, thresholds: list[float], room: list[int], equal: list[int]) -> list[float]:
    """The flat index from which entries equal to the threshold go, where there is `room` for so many."""
    cuts = [math.inf if left == count else -1.0 for left, count in zip(room, equal, strict=True)]
    left = list(room)
    offset = 0
    for _, block, _ in blocks():
        for t, row in enumerate(block):
            if cuts[t] < 0:
                equals = torch.as_tensor(to_array(row.abs()) == thresholds[t]).nonzero()[:, 0]
                if len(equals) >= left[t]:
                    cuts[t] = offset + int(equals[left[t] - 1]) + 1
                left[t] -= len(equals)
        if min(cuts) >= 0:
            break
        offset += block.shape[1]
    return cuts


def keep_largest(values: Tensor, kept: int) -> Tensor:
    """Zero all but the `kept` entries of largest magnitude of `[T, *S]`, in each row on its own.

    Of equal magnitudes the lowest flat index stays first.
    """
    rows = values.reshape(len(values), -1)
    return select_largest([lambda: iter([(None, rows, None)])], kept, rows.shape[1]).trim(rows).view_as(values)
