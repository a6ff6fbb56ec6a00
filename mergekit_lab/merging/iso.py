"""Iso-C and Iso-CTS: give the merged matrix a flat spectrum.

Marczak et al. 2025, "No task left behind: isotropic model merging with common and task-specific subspaces",
sections 4 and 5. The spectrum of the summed task vectors is dominated by directions that a few experts
share; isotropic merging replaces every singular value by their mean. Iso-CTS first replaces the least common
directions by directions of single experts.

Reference: danielm1405/iso-merging (`src/utils/iso.py`); its task directions are made orthogonal to the
common ones on the left side (the outputs) only, and so are ours. Differences: directions with a singular value
of zero (to the precision of the data) are left out, where the original gives the arbitrary vectors of its SVD
the mean singular value; and a `common` so small that the original's rounding asks for more task directions than
the matrix has is rounded down. Both agree elsewhere to 1e-10.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Site
from mergekit_lab.merging.factorizations import orthogonalize, solve_precise_triplets, solve_triplets
from mergekit_lab.merging.spectral import SpectralMethod
from mergekit_lab.ranges import Proportion


@dataclass(frozen=True, kw_only=True)
class IsoC(SpectralMethod):
    """`θ0 + α·mean(Σ)·UVᵀ` with `UΣVᵀ = Σ_t δ_t` for matrices, `θ0 + α·mean(δ)` for other tensors.

    Args:
        coefficient: `α`.
        weights: `λ_t` scales `δ_t` first; 1 by default.

    Notes `rank` where the sum has fewer directions than the matrix.
    """

    def merge_matrices(self, deltas: Tensor, sites: Sequence[Site]) -> Tensor:
        total = reduce(Tensor.add_, _weigh_each(deltas, sites))
        polar, ranks = orthogonalize(total, deltas.dtype)
        directions = min(total.shape[1:])
        for site, rank in zip(sites, ranks.tolist(), strict=True):
            if rank < directions:
                site.note("rank", f"{rank} of {directions} directions")
        mean = (polar * total).sum(dim=(-2, -1), keepdim=True) / directions
        return (mean * polar).to(deltas.dtype)


@dataclass(frozen=True, kw_only=True)
class IsoCTS(SpectralMethod):
    """Iso-C on a basis of common directions and an equal number of directions of each expert.

    Of a matrix's `r` directions, `q` an expert and `r − qT` common ones (`split_directions`). The result
    is `mean(σ)·polar(U)·polar(V)ᵀ`, `σ` the singular values of all `r`.

    Args:
        common: share of common directions, in [0, 1]; 1 is Iso-C.
        coefficient: `α`.
        weights: `λ_t` scales `δ_t` first; 1 by default.

    Notes `rank_deficient` where the directions are not independent.
    """

    common: Proportion = 0.8

    def merge_matrices(self, deltas: Tensor, sites: Sequence[Site]) -> Tensor:
        deltas = sites[0].orient(deltas)
        experts, r = deltas.shape[1], min(deltas.shape[2:])
        own, common = split_directions(r, experts, self.common)
        u, s, v = solve_precise_triplets(reduce(Tensor.add_, _weigh_each(deltas, sites)), common)
        if own:
            own_u, own_s, own_v = _solve_own_triplets(deltas, sites, u, own)
            u = torch.cat([own_u.mT.flatten(1, 2), u.mT], dim=1).mT
            s = torch.cat([own_s.flatten(1), s], dim=1)
            v = torch.cat([own_v.mT.flatten(1, 2), v.mT], dim=1).mT
        tolerance = 1e-12 if deltas.dtype == torch.float64 else 1e-6
        real = (s > tolerance * s.amax(dim=-1, keepdim=True))[:, None]
        white_u, u_rank = orthogonalize(u.mul_(real), deltas.dtype, overwrite=True)
        del u
        white_v, v_rank = orthogonalize(v.mul_(real), deltas.dtype, overwrite=True)
        del v
        for site, *ranks in zip(sites, u_rank.tolist(), v_rank.tolist(), strict=True):
            if min(ranks) < r:
                site.note("rank_deficient", {"atoms": r, "u": ranks[0], "v": ranks[1]})
        merged = (white_u @ white_v.mT).mul_(s.mean(dim=-1)[:, None, None]).to(deltas.dtype)
        return sites[0].orient(merged)


def _solve_own_triplets(deltas: Tensor, sites: Sequence[Site], u: Tensor, rank: int) -> tuple[Tensor, ...]:
    """The `rank` largest triplets of each `λ_t δ_t` apart from the common left directions `u` `[B, m, c]`.

    Returns:
        `U` `[B, T, m, k]`, `S` and `V`, in float64.
    """
    batch, experts, m, n = deltas.shape
    basis = _complete_basis(u) if u.shape[2] and m <= n else None
    apart = map(partial(_remove_common, u=u, basis=basis, dtype=deltas.dtype), _weigh_each(deltas, sites))
    if deltas.is_cuda:  # where many matrices are factorized together
        triplets = solve_triplets(torch.stack(list(apart), dim=1).flatten(0, 1), rank)
        own_u, own_s, own_v = (x.unflatten(0, (batch, experts)) for x in triplets)
    else:
        each = zip(*(solve_triplets(matrices, rank, overwrite=True) for matrices in apart), strict=True)
        own_u, own_s, own_v = (torch.stack(x, dim=1) for x in each)
    return own_u if basis is None else basis[:, None] @ own_u, own_s, own_v


def _remove_common(delta: Tensor, u: Tensor, basis: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`[B, m, n]` without what lies in the columns of `u`, or `[B, m−c, n]` in the coordinates of `basis`."""
    apart = _project_out(delta, u) if basis is None else basis.mT @ delta
    return apart.to(dtype) if apart.is_cuda else apart


def _project_out(matrices: Tensor, u: Tensor) -> Tensor:
    """`[B, m, n]`, column by column in memory, without what lies in the columns of `u` `[B, m, c]`."""
    return torch.baddbmm(matrices.mT, matrices.mT @ u, u.mT, alpha=-1).mT


def _complete_basis(u: Tensor) -> Tensor:
    """Orthonormal columns `[B, m, m−c]` apart from those of `u` `[B, m, c]`.

    In their coordinates the experts' matrices are small and of full rank, which is what factorizations on a
    GPU want.
    """
    rows, columns = u.shape[1:]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(rows, rows - columns, generator=generator, dtype=u.dtype).to(u.device)
    return orthogonalize(_project_out(start[None], u), u.dtype)[0]


def split_directions(r: int, experts: int, common: float) -> tuple[int, int]:
    """Directions of each expert, and common ones, of a matrix with `r`.

    `int(common·r)` are asked for; the rest is rounded to a multiple of `experts`, half to even, and down
    where that would be more than there are.
    """
    own = min(round((r - int(common * r)) / experts), r // experts)
    return own, r - own * experts


def _weigh_each(deltas: Tensor, sites: Sequence[Site]) -> Iterator[Tensor]:
    """`λ_t δ_t` `[B, m, n]`, one expert after another, in float64: a flat spectrum amplifies what single
    precision loses."""
    weights = torch.stack([site.weights for site in sites]).double()[..., None, None]
    for t in range(deltas.shape[1]):
        yield deltas[:, t].double() * weights[:, t]
