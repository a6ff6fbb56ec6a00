"""SAGM: minimize the loss, the loss at SAM's point, and the angle between their gradients.

Wang, Zhang, Lei, Zhang: Sharpness-Aware Gradient Matching for Domain Generalization (CVPR 2023), section 3.2,
algorithm 1: the sum of ∇L(θ) and the gradient at θ + ρ g/‖g‖ − α g. Reference implementation:
Wang-pengfei/SAGM, `SAGM(adaptive=False)`. It takes the mean of the two gradients instead of the sum, and so do
we. So learning rates mean the same as for the base.

Where we differ: as in sam.py.
"""

from typing import ClassVar

from torch import Tensor

from mergekit_lab.optim.ascent import AscentOptimizer
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters, Setting, combine, scale
from mergekit_lab.optim.pgn import interpolate
from mergekit_lab.optim.sharded import compute_global_norm
from mergekit_lab.ranges import NotNegative


def compute_sagm_perturbation(grads: list[Tensor], rho: Setting, alpha: Setting) -> list[Tensor]:
    """e = (ρ / (‖g‖ + 1e-12) − α) g, ‖g‖ over all tensors together; zero gradients give e = 0."""
    norm = compute_global_norm(grads) + 1e-12
    return scale(grads, combine(lambda radius, length: radius / norm - length, rho, alpha))


class SAGM(AscentOptimizer):
    """Sharpness-aware gradient matching around any base optimizer. Two evaluations per step, and both gradients
    are used.

    Extra memory: SAM's, and the first gradients.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        rho: radius ρ ≥ 0 of the ball.
        alpha: α ≥ 0, a step length; with ρ and α 0 this is the base optimizer. The authors use 0.001.
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
        alpha: NotNegative = 1e-3,
    ) -> None:
        self.alpha = alpha
        super().__init__(named_parameters, base, rho)

    @property
    def perturbs(self) -> bool:
        return super().perturbs or any(alpha > 0 for alpha in self.list_values("alpha"))

    def compute_perturbation(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        rho, alpha = (self.read_setting(name, params, signed=True) for name in ("rho", "alpha"))
        return compute_sagm_perturbation(grads, rho, alpha)

    def mix(self, params: list[Tensor], first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
        return interpolate(first, second, 0.5)
