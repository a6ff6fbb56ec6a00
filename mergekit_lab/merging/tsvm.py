"""TSV-M: task singular vectors, merged after whitening.

Gargiulo et al. 2025, "Task singular vectors", section 4; reference: AntoAndGar/task_singular_vectors.
Each expert keeps the top `int(r/T)` singular triplets of each matrix; the concatenated left and right
vectors are replaced by their polar factors, which removes the interference between experts. 2-D tensors are
treated so, embeddings included, text projections excepted; all others are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_lab.merging.contract import ScaledMethod, Site, require, weighted
from mergekit_lab.merging.pieces import is_spectral, rank_budget, whitened_atoms


@dataclass(frozen=True, kw_only=True)
class TSVM(ScaledMethod):
    """`θ0 + α U_⊥ diag(σ) V_⊥ᵀ` for matrices, `θ0 + α·mean(δ)` for other tensors.

    Args:
        rank: cap on the triplets an expert keeps of a matrix, at least 1; None keeps `int(r/T)`, which
            no cap exceeds. Capped tensors, and those with `r < T` (nothing kept), are noted.
        coefficient: `α`.
        weights: `λ_t` scales `δ_t` before its decomposition; 1 by default.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        require(self.rank is None or self.rank >= 1, "rank", self.rank, "at least 1, or None")

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        deltas = weighted(deltas, site.weights)
        if not is_spectral(name, base):
            return deltas.mean(dim=0)
        rank = noted_rank(base.shape, len(deltas), self.rank, site)
        if rank == 0:
            return torch.zeros_like(base)
        atoms = whitened_atoms(deltas, rank, site.note)
        return atoms.lift(atoms.sigma)


def noted_rank(shape: torch.Size, experts: int, cap: int | None, site: Site) -> int:
    """The rank an expert gets of a matrix; a note where it is none, or less than the cap asked for."""
    rank = rank_budget(shape, experts, cap)
    if rank == 0:
        site.note("rank", "0: more experts than the matrix has directions, the base stays")
    elif cap is not None and rank < cap:
        site.note("rank", f"{rank}: all that {experts} experts can have of {min(shape)} directions")
    return rank
