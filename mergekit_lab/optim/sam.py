"""SAM: step with the gradient taken where the loss is worst, to first order, within a ball of radius ρ.

Foret, Kleiner, Mobahi, Neyshabur: Sharpness-Aware Minimization for Efficiently Improving Generalization
(ICLR 2021), section 2, algorithm 1, p = 2. Reference implementation: davda54/sam, `SAM(adaptive=False)`.

Where we differ: θ is restored from a copy in every precision. Gradients are dropped between the two
evaluations. Norms of low-precision gradients are computed in float32. `ascent_fraction` is our name for the
cheaper ascent on a part of the batch. `sync_ascent=False` is the paper's m-SAM with one m per rank.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from mergekit_lab.optim.ascent import AscentOptimizer
from mergekit_lab.optim.parameters import Setting, combine, scale
from mergekit_lab.optim.sharded import compute_global_norm


def compute_sam_perturbation(grads: Sequence[Tensor], rho: Setting) -> list[Tensor]:
    """e = ρ g / (‖g‖ + 1e-12), ‖g‖ over all tensors together; zero gradients give e = 0.

    Args:
        grads: gradients of any shapes, 0-d included. They are not changed.
        rho: radius of the ball, in units of the weights' L2 norm. One number, or one per gradient. A negative
            radius descends.

    Returns:
        One tensor per gradient, same shapes. With a single ρ, ‖e‖ = |ρ|, up to the 1e-12. Zero gradients
            give 0.
    """
    norm = compute_global_norm(grads) + 1e-12
    return scale(grads, combine(lambda each: each / norm, rho))


class SAM(AscentOptimizer):
    """Sharpness-aware minimization around any base optimizer. Two evaluations per step.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        rho: radius ρ ≥ 0 of the ball; 0 is the base optimizer. SAFT uses 0.05.
        ascent_fraction, sync_ascent: see `AscentOptimizer`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = SAM(model.named_parameters(), base=lambda p: torch.optim.SGD(p, lr=0.1), rho=0.05)
        >>> def closure():
        ...     loss = model(torch.ones(2, 3)).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ("ascent_fraction", "sync_ascent")
    takes_sharded = True
    recordable = True

    def compute_perturbation(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        return compute_sam_perturbation(grads, self.read_setting("rho", params, signed=True))
