"""PGN: minimize the loss plus λ times the norm of its gradient.

Zhao, Zhang, Hu: Penalizing Gradient Norm for Efficiently Improving Generalization in Deep Learning (ICML 2022),
section 3.2, algorithm 1. The norm's gradient is a difference of two gradients over a distance r. The step's
gradient is then (1 − α) ∇L(θ) + α ∇L(θ + r g/‖g‖) with α = λ/r. Reference implementation: zhaoyang-0204/gnp.

Where we differ: as in sam.py.
"""

from typing import ClassVar

from torch import Tensor

from mergekit_lab.optim.ascent import AscentOptimizer
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters, Setting, lerp_
from mergekit_lab.optim.sam import compute_sam_perturbation
from mergekit_lab.ranges import NotNegative


def interpolate(first: list[Tensor], second: list[Tensor], alpha: Setting) -> list[Tensor]:
    """(1 − α) g(θ) + α g(θ + e), pairwise over `first` and `second`."""
    mixed = [gradient.clone() for gradient in first]
    lerp_(mixed, second, alpha)  # in place: torch 2.11 has no other for sharded tensors
    return mixed


class PGN(AscentOptimizer):
    """Gradient-norm penalty around any base optimizer. Two evaluations per step, and both gradients are used.

    Extra memory: SAM's, and the first gradients.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        rho: r ≥ 0, the distance; 0 is the base optimizer.
        alpha: α = λ/r ≥ 0; 0 is the base optimizer, 1 is SAM. The authors use 0.8.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ("alpha",)
    group_settings: ClassVar[tuple[str, ...]] = saved_attributes
    takes_sharded = True
    recordable = True

    def __init__(
        self,
        named_parameters: Parameters,
        base: BaseOptimizer,
        rho: NotNegative = 0.05,
        alpha: NotNegative = 0.8,
    ) -> None:
        self.alpha = alpha
        super().__init__(named_parameters, base, rho)

    @property
    def perturbs(self) -> bool:
        return super().perturbs and any(alpha > 0 for alpha in self.list_values("alpha"))

    def compute_perturbation(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        return compute_sam_perturbation(grads, self.read_setting("rho", params, signed=True))

    def mix(self, params: list[Tensor], first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
        return interpolate(first, second, self.read_setting("alpha", params))
