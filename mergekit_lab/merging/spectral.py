"""Singular directions of the experts: the base of the matrix methods and the steps they share.

Everything here works on a batch of `B` same-shaped matrices, because a GPU factorizes hundreds of them in
the time of a few.

Legend: `B` matrices, `T` experts, `m×n` a matrix, `r = min(m, n)`, `k` triplets an expert keeps, `p = kT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_lab.merging.contract import ScaledMethod, Site, weighted

_NO_MATRIX = "text_projection"


@dataclass(frozen=True, kw_only=True)
class SpectralMethod(ScaledMethod):
    """Base of the methods that merge matrices as matrices: `θ0 + α·merge_matrices(δ)`.

    2-D tensors are treated so, embeddings included, text projections excepted (the TSV-M authors' rule); all
    others get `α` times the mean of the task vectors, each scaled by its `λ_t`.
    """

    def is_matrix(self, name: str, shape: Sequence[int]) -> bool:
        """Whether `merge_matrices` takes this tensor."""
        return len(shape) == 2 and _NO_MATRIX not in name

    def merge_matrices(self, bases: Tensor, deltas: Tensor, sites: Sequence[Site]) -> Tensor:
        """The merged task vectors of same-shaped matrices at `α = 1`.

        Args:
            bases: `θ0`, `[B, m, n]`.
            deltas: `δ`, `[B, T, m, n]`.
            sites: one a matrix; they differ in side inputs and in where notes go.

        Returns:
            `[B, m, n]`.
        """
        raise NotImplementedError

    def merge_other(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        """The merged task vector of a tensor that is no matrix."""
        return weighted(deltas, site.weights).mean(dim=0)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        if self.is_matrix(name, base.shape):
            return self.merge_matrices(base[None], deltas[None], [site])[0]
        return self.merge_other(name, base, deltas, site)


@dataclass(frozen=True)
class Atoms:
    """Rank-one directions of all experts, whitened together.

    `p` atoms a matrix, `u_i v_iᵀ` with `u` `[B, m, p]` and `v` `[B, n, p]` whose columns are orthonormal
    (a partial isometry where the experts' directions are not independent); `sigma` `[B, p]` their singular
    values; `task` `[p]` the expert an atom came from.
    """

    u: Tensor
    v: Tensor
    sigma: Tensor
    task: Tensor

    def lift(self, coordinates: Tensor) -> Tensor:
        """`U_⊥ diag(d) V_⊥ᵀ` for coordinates `d` `[B, p]`: `[B, m, n]`."""
        return (self.u * coordinates[:, None]) @ self.v.mT


def rank_budget(shape: Sequence[int], experts: int, cap: int | None) -> int:
    """Singular triplets an expert may keep of an `m×n` matrix: `int(r·(1/T))`, at most `cap`."""
    share = int(min(shape) * (1 / experts))
    return share if cap is None else min(cap, share)


def noted_rank(shape: Sequence[int], experts: int, cap: int | None, sites: Sequence[Site]) -> int:
    """`rank_budget`, with a note where it is 0, or less than the cap asked for."""
    rank = rank_budget(shape, experts, cap)
    for site in sites:
        if rank == 0:
            site.note("rank", "0: more experts than the matrix has directions, the base stays")
        elif cap is not None and rank < cap:
            site.note("rank", f"{rank}: all that {experts} experts can have of {min(shape)} directions")
    return rank


def svd(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVD of a batch `[…, m, n]`: `U` `[…, m, r]`, `S` `[…, r]`, `V` `[…, n, r]`, in float64.

    Float64 whatever comes in: single precision is off by up to 1e-4 on the flat spectra of task vectors.
    """
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    return u, s, vh.mT


def polar_factor(matrices: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """The orthonormal factors `U Vᵀ` of `matrices = U S Vᵀ` `[…, m, p]`, and their numerical ranks `[…]`.

    Directions with `s ≤ tol·s_max` (tol 1e-12 where `precision`, the dtype of the data, is float64; else
    1e-6) have no polar direction: they are left out, which makes the factor a partial isometry.
    """
    tolerance = 1e-12 if precision == torch.float64 else 1e-6
    u, s, v = svd(matrices)
    keep = s > tolerance * s.amax(dim=-1, keepdim=True)
    return (u * keep[..., None, :]) @ v.mT, keep.sum(dim=-1)


def whitened_atoms(deltas: Tensor, rank: int, sites: Sequence[Site]) -> Atoms:
    """The top triplets of every `δ_t` in task order, `U` and `V` replaced by their polar factors; float64.

    Args:
        deltas: `[B, T, m, n]`.
        rank: `k ≥ 1`, with `kT ≤ r`.
        sites: receive the note `rank_deficient` where the experts' directions are not independent.

    Atoms with `σ = 0` (an expert equal to the base) are zero columns.
    """
    u, s, v = svd(deltas)
    kept = s[..., :rank]
    real = kept > 0
    sigma = kept.flatten(1)
    u, v = ((x[..., :rank] * real[..., None, :]).movedim(1, 2).flatten(2) for x in (u, v))
    white_u, u_rank = polar_factor(u, deltas.dtype)
    white_v, v_rank = polar_factor(v, deltas.dtype)
    for site, *ranks in zip(
        sites, real.flatten(1).sum(1).tolist(), u_rank.tolist(), v_rank.tolist(), strict=True
    ):
        if min(ranks) < sigma.shape[1]:
            site.note("rank_deficient", dict(zip(("atoms", "u", "v"), ranks, strict=True)))
    task = torch.arange(deltas.shape[1], device=deltas.device).repeat_interleave(rank)
    return Atoms(white_u, white_v, sigma, task)
