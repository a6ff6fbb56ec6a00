"""The two terms of EpiMer's bound on what a merge in the experts' leading directions costs.

"Model Merging on Loss Landscapes: A Geometry Perspective", Theorem 2 (supplement, B.4.2): with
`H_t = diag(v_t) + ε`, `S` the whitened leading directions of all experts, and `λ_t = 1/T`, the mean rise of the
experts' losses is to second order at most `½(√V + √R)²`. `V = Σ λ_t (δ̃ − Sᵀδ_t)ᵀ SᵀH_tS (δ̃ − Sᵀδ_t)` is the
experts' conflict at the curvature-weighted mean `δ̃`, which no other merge in these directions lowers.
`R = Σ λ_t δ_t⊥ᵀ H_t δ_t⊥` is the residual: curvature along what the directions leave of a task vector.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Site
from mergekit_lab.merging.epimer import project_matrices, solve_mean
from mergekit_lab.merging.spectral import cap_rank, whiten_atoms

_FLOOR = 1e-8


@dataclass
class Bound:
    """The bound's terms for one matrix, or summed over several.

    Attributes:
        conflict: `V`.
        residual: `R`.
        whole: `Σ λ_t δ_tᵀ H_t δ_t`: R where no direction is kept.
    """

    conflict: float = 0.0
    residual: float = 0.0
    whole: float = 0.0

    def add(self, other: Self) -> None:
        """Add the terms of another matrix to these."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def bound(self) -> float:
        """`½(√V + √R)²`."""
        return (self.conflict**0.5 + self.residual**0.5) ** 2 / 2

    @property
    def lost(self) -> float:
        """The share of the task vectors' curvature that the directions leave out, in [0, 1]."""
        return min(1.0, self.residual / self.whole) if self.whole > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "conflict": self.conflict,
            "residual": self.residual,
            "bound": self.bound,
            "lost_curvature": self.lost,
        }


def measure_bound(deltas: Tensor, fishers: Tensor, rank: int) -> Bound:
    """Both terms of one matrix, in float64.

    Args:
        deltas: `δ`, `[T, m, n]`.
        fishers: `v`, the same shape, non-negative.
        rank: k, directions kept of an expert, at least 1; at most a T-th of the smaller side.
    """
    experts = len(deltas)
    kept = cap_rank(deltas.shape[1:], experts, rank)
    site = Site(tuple(map(str, range(experts))), deltas.new_ones(experts))
    atoms = whiten_atoms(deltas[None], kept, [site])
    inside = torch.stack([project_matrices(atoms, delta.double()[None]) for delta in deltas], dim=1)
    merged = inside.mean(dim=1)
    if kept:
        shares = torch.full((1, experts), 1 / experts, dtype=torch.float64, device=deltas.device)
        merged, _ = solve_mean(atoms, inside, fishers[None], shares, _FLOOR, shares.new_ones(experts))
    center = atoms.lift(merged)[0]
    bound = Bound()
    for t in range(experts):
        curvature, delta = fishers[t].double() + _FLOOR, deltas[t].double()
        own = atoms.lift(inside[:, t])[0]
        terms = [
            float((curvature * step.square()).sum()) / experts for step in (center - own, delta - own, delta)
        ]
        bound.add(Bound(*terms))
    return bound
