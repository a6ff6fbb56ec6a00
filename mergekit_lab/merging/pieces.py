"""Steps that several methods share: trimming, election, dropping, spectra.

Legend: `T` experts, `*S` a tensor's shape, `n` a flat block's length.
"""

from __future__ import annotations

import hashlib
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


# --- spectra ------------------------------------------------------------------------------------------

_EXCLUDED = "text_projection"


def is_spectral(name: str, delta: Tensor) -> bool:
    """Whether the spectral methods treat this tensor `[*S]` as a matrix: 2-D and no text projection."""
    return delta.dim() == 2 and _EXCLUDED not in name


def rank_budget(shape: torch.Size, experts: int, cap: int | None) -> int:
    """Singular triplets an expert may keep of an `[m, n]` matrix: `int(min(m, n)·(1/T))`, at most `cap`."""
    share = int(min(shape) * (1 / experts))
    return share if cap is None else min(cap, share)


def polar_factor(matrix: Tensor) -> tuple[Tensor, int]:
    """The orthonormal factor `U Vᵀ` of `matrix = U S Vᵀ`, and the numerical rank.

    Directions with `s ≤ tol·s_max` (tol 1e-6 in float32, 1e-12 in float64) have no polar direction:
    they are left out, which makes the factor a partial isometry. Computed in float64: a float32 Gram
    matrix would lose half the digits of these ill-conditioned concatenations.
    """
    tolerance = 1e-12 if matrix.dtype == torch.float64 else 1e-6
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    keep = s > tolerance * s.max()
    rank = int(keep.sum())
    return (u[:, keep] @ vh[keep]).to(matrix.dtype), rank


@dataclass(frozen=True)
class Atoms:
    """Rank-one directions of all experts, whitened together.

    `p` atoms: `u_i v_iᵀ` with `U_⊥ = [u_1 …]` `[m, p]`, `V_⊥` `[n, p]`, both with orthonormal columns;
    `sigma` `[p]` are the singular values `λ_t σ`, `task` `[p]` the expert an atom came from.
    """

    u: Tensor
    v: Tensor
    sigma: Tensor
    task: Tensor

    def lift(self, coordinates: Tensor) -> Tensor:
        """`U_⊥ diag(d) V_⊥ᵀ` for coordinates `d` `[p]`: `[m, n]`."""
        return (self.u * coordinates) @ self.v.T


def whitened_atoms(deltas: Tensor, rank: int, note: Callable[[str, object], None]) -> Atoms:
    """The top `rank` singular triplets of every `δ_t` in task order, `U` and `V` replaced by polar factors.

    Args:
        deltas: `[T, m, n]`.
        rank: `k ≥ 1`, with `kT ≤ min(m, n)`.
        note: receives `rank_deficient`, the ranks of `U` and `V` where they fall short.

    Atoms with `σ = 0` (an expert equal to the base) are dropped.
    """
    us, sigmas, vs, tasks = [], [], [], []
    for t, delta in enumerate(deltas.double()):
        u, s, vh = torch.linalg.svd(delta, full_matrices=False)
        real = s[:rank] > 0
        us.append(u[:, :rank][:, real])
        sigmas.append(s[:rank][real])
        vs.append(vh[:rank][real].T)
        tasks.append(torch.full((int(real.sum()),), t, device=deltas.device))
    sigma = torch.cat(sigmas).to(deltas.dtype)
    if len(sigma) == 0:
        empty = deltas.new_zeros
        return Atoms(empty(deltas.shape[1], 0), empty(deltas.shape[2], 0), sigma, torch.cat(tasks))
    u_white, u_rank = polar_factor(torch.cat(us, dim=1).to(deltas.dtype))
    v_white, v_rank = polar_factor(torch.cat(vs, dim=1).to(deltas.dtype))
    if min(u_rank, v_rank) < len(sigma):
        note("rank_deficient", {"atoms": len(sigma), "u": u_rank, "v": v_rank})
    return Atoms(u_white, v_white, sigma, torch.cat(tasks))
