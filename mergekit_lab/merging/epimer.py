"""EpiMer: the Fréchet mean of the experts under a Fisher metric projected on their singular directions.

"Model Merging on Loss Landscapes: A Geometry Perspective" (supplement, sections B and C). The atoms
`S = [vec(u_i v_iᵀ)]` are TSV-M's, whitened, so `SᵀS = I`. With the empirical Fisher diagonal `v_t` of each
expert, `H_t = Sᵀ diag(v_t) S + εI`, `H̄ = Σ λ_t H_t`, `b = Σ λ_t H_t d_t`, the merged coordinates are
`H̄⁻¹ b` (mean) or `T·H̄⁻¹ b` (sum). The authors published no code; the coordinates `d_t` are our reading:
`tagged` gives each expert its own singular values on its own atoms, the one choice that recovers TSV-M when
all curvatures are equal; `full` projects `δ_t` on all atoms, as the notation table prints it; `own` keeps
of that projection the expert's atoms.

Only one Gram matrix is needed, that of `v̄ = Σ λ_t v_t`, because `H_t d_t = Sᵀ((v_t + ε) ∘ lift(d_t))`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergekit_lab.merging.contract import ScaledMethod, Site, Stream, require, require_choice
from mergekit_lab.merging.pieces import Atoms, is_spectral, whitened_atoms
from mergekit_lab.merging.tsvm import noted_rank

_COORDINATES = ("tagged", "full", "own")
_BLOCK_ENTRIES = 1 << 25


@dataclass(frozen=True, kw_only=True)
class EpiMer(ScaledMethod):
    """Curvature-weighted merge in the experts' singular directions.

    Args:
        rank: cap on the triplets an expert keeps of a matrix, at least 1; None keeps `int(r/T)`.
        coefficient: `α`.
        eps: `ε > 0`, added to every curvature; large values recover TSV-M.
        aggregator: `"sum"` scales the mean by T, as a sum of task vectors would be; `"mean"` does not.
        coordinates: `"tagged"`, `"full"` or `"own"`, see the module.
        normalise: bring the experts' Fishers to one scale first: `"none"`, `"trace"` (mean entry 1) or
            `"norm"` (root mean square 1). The paper specifies none, and the scale across tasks matters.
        weights: `λ_t ≥ 0`, brought to sum 1.

    Needs `statistics={"fisher": …}`. Notes `eta` a matrix: the gain `cᵀH̄⁻¹c ≥ 0` of the quadratic
    objective over the flat mean (Theorem 3). Other tensors: `α·mean(δ)`.
    """

    rank: int | None = 32
    eps: float = 1e-8
    aggregator: str = "sum"
    coordinates: str = "tagged"
    normalise: str = "none"

    side_inputs: ClassVar[tuple[str, ...]] = ("fisher",)

    def __post_init__(self) -> None:
        require(self.rank is None or self.rank >= 1, "rank", self.rank, "at least 1, or None")
        require(self.eps > 0, "eps", self.eps, "positive")
        require_choice("aggregator", self.aggregator, ("sum", "mean"))
        require_choice("coordinates", self.coordinates, _COORDINATES)
        require_choice("normalise", self.normalise, ("none", "trace", "norm"))

    def survey(self, stream: Stream) -> Any:
        if self.normalise == "none":
            return None
        totals = torch.zeros(len(stream.experts), dtype=torch.float64)
        for fisher in stream.side_blocks("fisher"):
            values = fisher.double()
            totals += (values if self.normalise == "trace" else values.square()).sum(dim=1).cpu()
        means = totals / stream.entries
        return means if self.normalise == "trace" else means.sqrt()

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        shares = site.weights / site.weights.sum()
        if not is_spectral(name, base):
            return torch.tensordot(shares, deltas, dims=1)
        rank = noted_rank(base.shape, len(deltas), self.rank, site)
        if rank == 0:
            return torch.zeros_like(base)
        atoms = whitened_atoms(deltas, rank, site.note)
        curvature = site.side["fisher"].double()
        if site.survey is not None:
            curvature = curvature / site.survey.to(curvature.device).view(-1, 1, 1)
        merged, eta = frechet_mean(
            Atoms(atoms.u.double(), atoms.v.double(), atoms.sigma.double(), atoms.task),
            self._coordinates(atoms, deltas).double(),
            curvature,
            shares.double(),
            self.eps,
        )
        site.note("eta", eta)
        return atoms.lift((merged * (len(deltas) if self.aggregator == "sum" else 1)).to(atoms.u.dtype))

    def _coordinates(self, atoms: Atoms, deltas: Tensor) -> Tensor:
        """`d`, `[T, p]`."""
        own = atoms.task == torch.arange(len(deltas), device=atoms.task.device)[:, None]
        if self.coordinates == "tagged":
            return torch.where(own, atoms.sigma, 0)
        projected = ((atoms.u.T @ deltas) * atoms.v.T).sum(dim=-1)
        return projected if self.coordinates == "full" else torch.where(own, projected, 0)


def frechet_mean(
    atoms: Atoms, coordinates: Tensor, curvature: Tensor, shares: Tensor, eps: float
) -> tuple[Tensor, float]:
    """`H̄⁻¹ b` and `η` of one matrix.

    Args:
        atoms: `p` whitened atoms of an `[m, n]` matrix, float64.
        coordinates: `d`, `[T, p]`.
        curvature: `v`, `[T, m, n]`, non-negative.
        shares: `λ`, `[T]`, summing to 1.
        eps: `ε`.
    """
    gram = projected_gram(atoms, torch.tensordot(shares, curvature, dims=1))
    gram.diagonal().add_(eps)
    pull = sum(
        (share * (v + eps) * atoms.lift(d) for share, v, d in zip(shares, curvature, coordinates, strict=True)),
        start=torch.zeros_like(curvature[0]),
    )
    b = ((atoms.u.T @ pull) * atoms.v.T).sum(dim=1)
    factor = torch.linalg.cholesky(gram)
    merged = torch.cholesky_solve(b[:, None], factor)[:, 0]
    residual = b - gram @ (shares @ coordinates)
    eta = float(residual @ torch.cholesky_solve(residual[:, None], factor)[:, 0])
    return merged, eta


def projected_gram(atoms: Atoms, curvature: Tensor) -> Tensor:
    """`Sᵀ diag(v) S`, `[p, p]`, for `v` `[m, n]`: `H_ij = Σ_ab v_ab U_ai V_bi U_aj V_bj`, in blocks of `i`."""
    u, v = atoms.u, atoms.v
    if curvature.shape[0] > curvature.shape[1]:
        u, v, curvature = v, u, curvature.T
    p = u.shape[1]
    step = max(1, _BLOCK_ENTRIES // max(1, v.shape[0] * p))
    rows = []
    for start in range(0, p, step):
        block = slice(start, min(start + step, p))
        inner = curvature @ (v[:, block].T[:, :, None] * v)
        rows.append((u[:, block].T[:, :, None] * u * inner).sum(dim=1))
    gram = torch.cat(rows) if rows else curvature.new_zeros(0, 0)
    return (gram + gram.T) / 2
