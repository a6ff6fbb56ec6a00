"""Friendly SAM: SAM that ascends only the batch's own part of the gradient, not what batches share.

Li, Zhou, He, Cheng, Huang: Friendly Sharpness-Aware Minimization (CVPR 2024), section 4, algorithm 1. Reference
implementation: nblt/F-SAM, `FriendlySAM(adaptive=False)`. The shared part is a running mean of past gradients.
It is subtracted before it is updated with the batch's gradient. The first step has no mean yet and is SAM's.

Where we differ: as in sam.py, and the running mean is float32 or wider.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mergekit_lab.optim.ascent import AscentOptimizer
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters, Setting, combine, lerp_
from mergekit_lab.optim.precision import widen
from mergekit_lab.optim.sam import compute_sam_perturbation
from mergekit_lab.ranges import NotNegative, Number, Proportion


def remove_mean(grads: list[Tensor], mean: list[Tensor], sigma: Setting) -> list[Tensor]:
    """d = g − σ m, one tensor per gradient; `mean` holds m, pairwise of the same shape."""
    if isinstance(sigma, list):
        return list(torch._foreach_sub(grads, torch._foreach_mul(mean, sigma)))
    return list(torch._foreach_sub(grads, mean, alpha=sigma))


class FriendlySAM(AscentOptimizer):
    """Friendly sharpness-aware minimization around any base optimizer. Two evaluations per step.

    Extra memory: SAM's, and a running mean of the gradients.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        rho: radius ρ ≥ 0 of the ball; 0 is the base optimizer.
        sigma: σ, the factor on the subtracted running mean; 0 is SAM.
        lmbda: λ in [0, 1], the weight of the past in the running mean.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ("sigma", "lmbda")
    group_settings: ClassVar[tuple[str, ...]] = saved_attributes
    saved_tensors: ClassVar[tuple[str, ...]] = ("mean",)
    mean: dict[Tensor, Tensor]
    takes_sharded = True
    recordable = True

    def __init__(
        self,
        named_parameters: Parameters,
        base: BaseOptimizer,
        rho: NotNegative = 0.05,
        sigma: Number = 1.0,
        lmbda: Proportion = 0.9,
    ) -> None:
        self.sigma = sigma
        self.lmbda = lmbda
        super().__init__(named_parameters, base, rho)

    def compute_perturbation(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        grads = widen(grads)
        means = [
            self.mean[p] if p in self.mean else torch.zeros_like(g) for p, g in zip(params, grads, strict=True)
        ]
        direction = remove_mean(grads, means, self.read_setting("sigma", params))
        lerp_(means, grads, combine(lambda past: 1 - past, self.read_setting("lmbda", params)))
        self.mean.update({p: g.clone() for p, g in zip(params, grads, strict=True) if p not in self.mean})
        return compute_sam_perturbation(direction, self.read_setting("rho", params, signed=True))
