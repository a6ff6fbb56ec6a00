"""WUDI: the merged task vector whose difference from each expert's is small on that expert's own inputs.

Cheng et al. 2025, "Whoever started the interference should end it" (WUDI-Merging), section 4: a linear
layer's task vector spans its inputs, so the interference with expert t is bounded by
`‖(m − δ_t) δ_tᵀ‖_F² / ‖δ_t‖_F²`. Per matrix, `m` starts at `Σ δ_t` and follows Adam down the sum over t.

Reference: nathanielyvo/WUDI-Merging (`vit/wudi_main.py`): the attention and MLP weights are optimized, every
other tensor stays at the base. tanganke/fusion_bench optimizes every matrix, embeddings included, and gives all
others the mean: `all_matrices`. An expert equal to the base on a matrix makes both divide 0 by 0; here it adds
nothing to the objective.

What the gradient is made of does not change from step to step, so a step costs one product, whatever the number
of experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Site
from mergekit_lab.merging.spectral import LayerWeightsMethod, weigh
from mergekit_lab.ranges import Natural, Rate


@dataclass(frozen=True, kw_only=True)
class WUDI(LayerWeightsMethod):
    """`θ0 + α·argmin_m Σ_t ‖(m − δ_t) δ_tᵀ‖² / ‖δ_t‖²`, by a fixed number of Adam steps.

    Args:
        steps: Adam steps, at least 0; 0 is task arithmetic on the matrices.
        lr: Adam's learning rate, positive, at most 1e30. In units of a weight's change, not relative.
        all_matrices: optimize every matrix, and take the mean of the others (fusion_bench, 400 steps there).
        coefficient: `α`.
        weights: `λ_t` scales `δ_t` first; 1 by default.
    """

    steps: Natural = 300
    lr: Rate = 1e-5

    def merge_matrices(self, deltas: Tensor, sites: Sequence[Site]) -> Tensor:
        orient = sites[0].orient
        return orient(minimize_interference(orient(weigh(deltas, sites)), self.steps, self.lr))


@torch.no_grad()
def minimize_interference(deltas: Tensor, steps: int, lr: float) -> Tensor:
    """Compute `m` by `steps` Adam steps from `Σ δ_t`, for a batch of matrices.

    With `x = m − Σ δ_t`, which starts at 0, the gradient is `2 (x G + P)`, where `G = Σ δ_tᵀδ_t/‖δ_t‖²`
    `[B, n, n]` and `P = Σ_t (Σ_{s≠t} δ_s) δ_tᵀδ_t/‖δ_t‖²`. Nothing large cancels, so that it is 0 where experts
    do not interfere: Adam would blow up what rounding leaves.

    Args:
        deltas: `δ`, `[B, T, m, n]`.
        steps: at least 0.
        lr: positive.

    Returns:
        `[B, m, n]`.
    """
    total = deltas.sum(dim=1)
    batch, experts, _, columns = deltas.shape
    gram, push = deltas.new_zeros(batch, columns, columns), torch.zeros_like(total)
    for t in range(experts):
        delta = deltas[:, t]
        energy = delta.square().sum(dim=(-2, -1), keepdim=True)
        own = delta.mT @ (delta / torch.where(energy == 0, 1, energy))
        gram += own
        push.baddbmm_(total - delta, own)
    change = torch.zeros_like(total).requires_grad_()
    optimizer = torch.optim.Adam([change], lr=lr)
    for _ in range(steps):
        change.grad = torch.baddbmm(push, change, gram).mul_(2)
        optimizer.step()
    return total.add_(change)
