"""DOGE-TA: task arithmetic whose task vectors are moved together, so that the merged one is near each.

Wei et al. 2025, "Modeling multi-task model merging as adaptive projective gradient descent", section 3, for
task arithmetic. Per matrix, expert t counts `c_t = size/‖δ_t‖`. A change `Δ` of all task vectors starts at 0
and follows Adam down the gap between what is merged and each expert, on its own directions row by row:
`Σ_t Σ_rows ⟨δ_t, δ_t − Σ_s c_s (δ_s + Δ)⟩²`. Each gradient first loses what lies in the subspace that the
experts share. The merge is `Σ_t c_t (δ_t + Δ)`, of each expert at its largest entries alone.

Reference: tanganke/fusion_bench (`method/doge_ta`), by one of the authors, which their repository runs. An
expert equal to the base on a matrix makes it divide by 0; here it counts nothing. Where the experts have
fewer directions than the shared subspace is given, it takes arbitrary ones of its SVD; here there are none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from mergekit_lab.merging.contract import Site, Stream
from mergekit_lab.merging.factorizations import solve_triplets
from mergekit_lab.merging.selection import select_largest
from mergekit_lab.merging.spectral import LayerWeightsMethod, cap_rank
from mergekit_lab.ranges import Natural, Positive, Rate, Share


@dataclass(frozen=True, kw_only=True)
class DOGE(LayerWeightsMethod):
    """`θ0 + α Σ_t c_t (δ_t + Δ)` at the largest entries of each `δ_t`, with `c_t = λ_t·size/‖δ_t‖`.

    Args:
        size: positive Frobenius norm to which each expert's matrix is scaled: the authors' global magnitude.
        density: share of each task vector's entries to keep, in (0, 1], over all matrices merged this way.
        subspace: the shared subspace has `int(r/subspace)` of the `r = min(m, n)` directions; at least 1.
        steps: Adam steps, at least 0.
        lr: Adam's learning rate, positive, at most 1e30. In units of a weight's change, not relative.
        all_matrices: merge every matrix this way, and average other tensors; otherwise those stay the base's.
        coefficient: `α`; the authors set `size` alone.
        weights: `λ_t` of the experts' shares `c_t`, 1 by default.
    """

    size: Positive = 0.07
    density: Share = 0.3
    subspace: Annotated[float, Ge(1)] = 6
    steps: Natural = 400
    lr: Rate = 1e-4

    def survey(self, stream: Stream) -> list[float] | None:
        """The magnitude from which entries stay, of each expert."""
        matrices = stream.select(self.is_matrix)
        if not matrices.entries:
            return None
        shares = [share.read_blocks for share in matrices.divide()]
        kept = int(self.density * matrices.entries) + 1
        return select_largest(shares, kept, matrices.entries, with_ties=True).thresholds

    def merge_matrices(self, deltas: Tensor, sites: Sequence[Site]) -> Tensor:
        orient = sites[0].orient
        deltas = orient(deltas).contiguous()
        shares = share_equally(deltas, self.size) * torch.stack([site.weights for site in sites])
        basis = find_shared_directions(deltas, self.subspace)
        change = narrow_gaps(deltas, shares, basis, self.steps, self.lr)
        merged = torch.zeros_like(change)
        for t, bound in enumerate(sites[0].survey):
            delta = deltas[:, t]
            moved = (delta + change).mul_(delta.abs() >= bound)
            merged.addcmul_(moved, shares[:, t, None, None])
        return orient(merged)


def share_equally(deltas: Tensor, size: float) -> Tensor:
    """`size/‖δ_t‖` `[B, T]` of matrices `[B, T, m, n]`; 0 where `δ_t` is."""
    norms = torch.linalg.vector_norm(deltas, dim=(-2, -1))
    return torch.where(norms > 0, size / norms, 0)


def find_shared_directions(deltas: Tensor, subspace: float) -> Tensor:
    """Orthonormal columns `[B, m, q]`: the main left directions of the experts' own `int(r/T)` main ones.

    Args:
        deltas: `δ`, `[B, T, m, n]`.
        subspace: `q` is `int(r/subspace)`, or as many as the experts have together. Columns are zero where they
            have less.
    """
    batch, experts, rows, columns = deltas.shape
    own = cap_rank((rows, columns), experts, None)
    count = min(int(min(rows, columns) / subspace), own * experts)
    if count == 0:
        return deltas.new_zeros(batch, rows, 0)
    u = torch.cat([_find_directions(delta, own) for delta in deltas.unbind(1)], dim=-1)
    return _find_directions(u, count)


def _find_directions(matrices: Tensor, count: int) -> Tensor:
    """The main left directions `[B, m, count]` of `[B, m, n]`, in its precision; zeros where it has less."""
    u, s, _ = solve_triplets(matrices, count)
    return u.mul_(s[:, None] > 1e-6 * s[:, None, :1]).to(matrices.dtype)


@torch.no_grad()
def narrow_gaps(deltas: Tensor, shares: Tensor, basis: Tensor, steps: int, lr: float) -> Tensor:
    """Compute `Δ` by `steps` Adam steps from 0, for a batch of matrices.

    With `c = Σ c_t` and `g_t = ⟨δ_t, δ_t − Σ_s c_s δ_s⟩`, a number per row, the gradient is
    `−2c Σ_t (g_t − c⟨δ_t, Δ⟩) δ_t`, less what of it lies in the columns of `basis`.

    Args:
        deltas: `δ`, `[B, T, m, n]`.
        shares: `c_t`, `[B, T]`.
        basis: orthonormal columns, `[B, m, q]`.
        steps: at least 0.
        lr: positive.

    Returns:
        `[B, m, n]`.
    """
    change = torch.zeros_like(deltas[:, 0]).requires_grad_()
    total = torch.zeros_like(change)
    for t, share in enumerate(shares.mT):
        total.addcmul_(deltas[:, t], share[:, None, None])
    rows = deltas.transpose(1, 2).flatten(0, 1)  # [B·m, T, n], of one matrix a view
    gaps = torch.stack([(x * (x - total)).sum(dim=-1) for x in deltas.unbind(1)], dim=-1).flatten(0, 1)
    del total
    sums = shares.sum(dim=1).repeat_interleave(deltas.shape[2])[:, None]
    optimizer = torch.optim.Adam([change], lr=lr)
    for _ in range(steps):
        left = gaps - sums * torch.bmm(rows, change.flatten(0, 1)[..., None])[..., 0]
        gradient = torch.bmm((-2 * sums * left)[:, None], rows).view_as(change)
        change.grad = gradient.baddbmm_(basis, basis.mT @ gradient, alpha=-1)
        optimizer.step()
    return change.detach()
