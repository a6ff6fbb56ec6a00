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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Site, Stream
from mergekit_lab.merging.fisher import sum_fishers
from mergekit_lab.merging.spectral import AtomMethod, Atoms, note_rank, whiten_atoms
from mergekit_lab.ranges import Count, Positive, require

_BLOCK_ENTRIES = 1 << 25
"""Entries of `V ∘ v_i` that one block of a Gram matrix holds on a GPU: 256 MiB in float64."""


@dataclass(frozen=True, kw_only=True)
class EpiMer(AtomMethod):
    """Curvature-weighted merge in the experts' singular directions.

    Args:
        rank: cap on the triplets an expert keeps of a matrix, at least 1; None keeps `int(r/T)`.
        coefficient: `α`.
        floor: `ε > 0`, added to every curvature; large values recover TSV-M.
        aggregator: `"sum"` scales the mean by T, as a sum of task vectors would be; `"mean"` does not.
        coordinates: `"tagged"`, `"full"` or `"own"`, see the module.
        normalize: bring the experts' Fishers to one scale first: `"none"`, `"trace"` (mean entry 1) or
            `"norm"` (root mean square 1). The paper specifies none, but the scale across tasks matters.
        weights: `λ_t ≥ 0`, scaled to sum 1.

    Reads the side input `fisher`. For each matrix it notes `eta`, the gain `cᵀH̄⁻¹c ≥ 0` over the flat mean
    (Theorem 3). Other tensors get `α·mean(δ)`, weighted by `λ_t`.
    """

    rank: Count | None = 32
    floor: Positive = 1e-8
    aggregator: Literal["sum", "mean"] = "sum"
    coordinates: Literal["tagged", "full", "own"] = "tagged"
    normalize: Literal["none", "trace", "norm"] = "none"

    side_inputs: ClassVar[tuple[str, ...]] = ("fisher",)
    signed = False

    def survey(self, stream: Stream) -> Any:
        if self.normalize == "none":
            return None
        totals = sum_fishers(stream, self.normalize)
        require(
            bool((totals > 0).all()), "a Fisher's sum", totals.tolist(), "positive to be brought to one scale"
        )
        means = totals / stream.entries
        return means if self.normalize == "trace" else means.sqrt()

    def find_divisor(self, site: Site) -> Tensor:
        return site.weights.sum()

    def merge_atoms(self, deltas: Tensor, sites: Sequence[Site]) -> tuple[Atoms, Tensor]:
        experts = deltas.shape[1]
        rank = note_rank(deltas.shape[2:], experts, self.rank, sites)
        atoms = whiten_atoms(deltas, rank, sites)
        if rank == 0:
            atoms = atoms.to(deltas.dtype)
            return atoms, atoms.sigma
        fishers = [site.side["fisher"] for site in sites]
        curvature = torch.stack(fishers) if len(fishers) > 1 else fishers[0][None]
        shares = torch.stack([site.weights / site.weights.sum() for site in sites]).double()
        scales = torch.ones(experts) if sites[0].survey is None else sites[0].survey
        merged, eta = solve_mean(
            atoms, self._choose_coordinates(atoms, deltas), curvature, shares, self.floor, scales.to(shares)
        )
        for site, gain in zip(sites, eta.tolist(), strict=True):
            site.note("eta", gain)
        merged = merged * (experts if self.aggregator == "sum" else 1)
        return atoms.to(deltas.dtype), merged.to(deltas.dtype)

    def _choose_coordinates(self, atoms: Atoms, deltas: Tensor) -> Tensor:
        """What each expert is in the basis of all atoms: `d`, `[B, T, p]`. The module says which there are."""
        experts, device = deltas.shape[1], deltas.device
        is_own_atom = torch.eye(experts, dtype=torch.bool, device=device)
        is_own_atom = is_own_atom.repeat_interleave(atoms.sigma.shape[1] // experts, dim=1)
        if self.coordinates == "tagged":
            return torch.where(is_own_atom, atoms.sigma[:, None], 0)
        projected = torch.stack([project_matrices(atoms, deltas[:, t].double()) for t in range(experts)], dim=1)
        return projected if self.coordinates == "full" else torch.where(is_own_atom, projected, 0)


def solve_mean(
    atoms: Atoms, coordinates: Tensor, curvature: Tensor, shares: Tensor, floor: float, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """`H̄⁻¹ b` `[B, p]` and `η` `[B]` of `B` matrices.

    Args:
        atoms: `p` whitened atoms of `[B, m, n]` matrices, float64.
        coordinates: `d`, `[B, T, p]`.
        curvature: `v`, `[B, T, m, n]`, non-negative.
        shares: `λ`, `[B, T]`, summing to 1 over T.
        floor: `ε`.
        scales: what each expert's curvature is divided by, `[T]`.
    """
    mean = atoms.u.new_zeros(curvature.shape[0], *curvature.shape[2:])
    pull = torch.zeros_like(mean)
    for t in range(shares.shape[1]):  # one expert at a time in float64
        fisher = curvature[:, t].to(torch.float64, copy=True).div_(scales[t])
        share = shares[:, t, None, None]
        mean.addcmul_(fisher, share)
        pull.addcmul_(fisher.add_(floor).mul_(atoms.lift(coordinates[:, t])), share)
        del fisher
    b = project_matrices(atoms, pull)
    del pull
    gram = project_curvature(atoms, mean)
    gram.diagonal(dim1=-2, dim2=-1).add_(floor)
    factor = torch.linalg.cholesky(gram)
    merged = torch.cholesky_solve(b[..., None], factor)[..., 0]
    flat = torch.einsum("bt,btp->bp", shares, coordinates)
    residual = b - (gram @ flat[..., None])[..., 0]
    eta = (residual * torch.cholesky_solve(residual[..., None], factor)[..., 0]).sum(dim=-1)
    return merged, eta


def project_matrices(atoms: Atoms, matrices: Tensor) -> Tensor:
    """`u_iᵀ M v_i` for `M` `[B, m, n]`: `[B, p]`."""
    return ((atoms.u.mT @ matrices) * atoms.v.mT).sum(dim=-1)


def project_curvature(atoms: Atoms, curvature: Tensor) -> Tensor:
    """`Sᵀ diag(v) S` `[B, p, p]` for `v` `[B, m, n]`: `H_ij = Σ_ab v_ab U_ai V_bi U_aj V_bj`.

    In blocks of `i`, contracting the larger dimension first: `W_i = v (V ∘ v_i)`, `H_i = Σ_a U_ai (U ∘ W_i)`,
    for `j ≥ i` alone: `H` is symmetric.
    """
    u, v = atoms.u, atoms.v
    if curvature.shape[1] > curvature.shape[2]:
        u, v, curvature = v, u, curvature.mT
    batch, p = u.shape[0], u.shape[2]
    gram = u.new_zeros(batch, p, p)
    entries = _BLOCK_ENTRIES if curvature.is_cuda else curvature.numel() // 2
    step = max(1, min(-(-p // 8), entries // (batch * v.shape[1] * p)))
    for start in range(0, p, step):
        rows, rest = slice(start, min(start + step, p)), slice(start, p)
        products = (v[:, :, rows, None] * v[:, :, None, rest]).flatten(2)
        inner = (curvature @ products).unflatten(2, (-1, p - start))
        gram[:, rows, rest] = (u[:, :, rows, None] * u[:, :, None, rest]).mul_(inner).sum(dim=1)
    upper = gram.triu()
    return upper + gram.triu(1).mT
