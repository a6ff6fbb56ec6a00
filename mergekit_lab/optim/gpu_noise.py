"""MergOPT's move as one Triton kernel for GPUs: copy the weights, draw an offset, add it.

Philox draws by (seed, number of the entry), in registers. Weights are read once and written twice; torch's
operations take ten passes. Importing this needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mergekit_lab.optim.noise import Noise

BLOCK = 4096
_ROW = tl.constexpr(5)
"""Numbers a block: addresses of its weights and copies, the number of its first draw, entries from and to."""
_TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _move(  # type: ignore[no-untyped-def]
    table, seed, factor, loc, scale, TYPE: tl.constexpr, LAPLACE: tl.constexpr, BLOCK: tl.constexpr
):
    row = table + tl.program_id(0).to(tl.int64) * _ROW
    weights = tl.load(row).to(tl.pointer_type(TYPE))
    copies = tl.load(row + 1).to(tl.pointer_type(TYPE))
    first, start, stop = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    quad = first // 4 + tl.arange(0, BLOCK // 4)
    low, high = quad.to(tl.uint32), (quad >> 32).to(tl.uint32)
    one, two, three, four = tl.philox(tl.load(seed), low, high, low * 0, low * 0)
    if LAPLACE:
        one, two = _make_laplace(one), _make_laplace(two)
        three, four = _make_laplace(three), _make_laplace(four)
    else:
        one, two = _make_normal(one, two)
        three, four = _make_normal(three, four)
    draws = tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), [BLOCK])
    entry = tl.arange(0, BLOCK)
    there = (entry >= start) & (entry < stop)
    value = tl.load(weights + entry, mask=there)
    tl.store(copies + entry, value, mask=there)
    moved = value.to(tl.float32) + tl.load(factor) * (loc + scale * draws)
    tl.store(weights + entry, moved.to(TYPE), mask=there)


@triton.jit
def _make_laplace(bits):  # type: ignore[no-untyped-def]
    """Mean 0 and mean absolute deviation 1, from 32 bits: one is the sign, 31 an exponential draw."""
    size = -tl.log(((bits >> 1).to(tl.float32) + 0.5) * (1.0 / 2147483648.0))
    return tl.where((bits & 1) == 1, size, -size)


@triton.jit
def _make_normal(bits, others):  # type: ignore[no-untyped-def]
    return tl.pair_uniform_to_normal(tl.uint_to_uniform_float(bits), tl.uint_to_uniform_float(others))


def save_and_move(
    params: Sequence[Tensor],
    copies: Sequence[Tensor],
    first: Sequence[int],
    seed: Tensor,
    factor: Tensor,
    noise: Noise,
) -> None:
    """Copy `params` into `copies`, then add `factor` · z to `params` in place, with z drawn entry by entry.

    Args:
        params: contiguous, on one GPU, in float32, bfloat16 or float16.
        copies: contiguous, with the same shapes and dtypes.
        first: the number of each tensor's first entry. An entry's draw depends only on its number and the seed.
        seed, factor: 0-d tensors on the GPU, int64 and float32.
        noise: the distribution of z.
    """
    for dtype in dict.fromkeys(p.dtype for p in params):
        chosen = [
            (p.data_ptr(), copy.data_ptr(), number, p.numel())
            for p, copy, number in zip(params, copies, first, strict=True)
            if p.dtype == dtype
        ]
        table = _tabulate(tuple(chosen), dtype.itemsize, seed.device)
        with torch.cuda.device_of(seed):
            _move[(len(table),)](
                table, seed, factor, noise.loc, noise.scale,
                TYPE=_TYPES[dtype], LAPLACE=noise.distribution == "laplace", BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip


@lru_cache(maxsize=4)
def _tabulate(chosen: tuple[tuple[int, int, int, int], ...], width: int, device: torch.device) -> Tensor:
    """A row a block, int64 `[blocks, 5]` on the device. Four draws are made at a time, so that a block begins
    at a number that four divides, up to three entries before the tensor's own first."""
    rows = []
    for weights, copies, number, count in chosen:
        before = number % 4
        begins = torch.arange(0, before + count, BLOCK)
        at = (begins - before) * width
        table = torch.stack([at + weights, at + copies, begins + number - before, -begins, -begins], 1)
        table[:, 3] = (table[:, 3] + before).clamp_(min=0)
        table[:, 4] = (table[:, 4] + before + count).clamp_(max=BLOCK)
        rows.append(table)
    return torch.cat(rows).to(device)


def probe() -> None:
    """Move a few weights; raise where the kernel cannot be built, or gives something else."""
    weights, copy = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    seed, factor = torch.zeros((), dtype=torch.int64, device="cuda"), torch.ones((), device="cuda")
    save_and_move([weights], [copy], [0], seed, factor, Noise("laplace"))
    if bool(copy.any()) or not bool(weights.all()):
        raise RuntimeError("the first move is wrong")
