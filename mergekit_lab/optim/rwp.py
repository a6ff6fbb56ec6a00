"""RWP: step with the gradient taken at a random point near θ, at a distance proportional to each filter's norm.

Li, Yan, Tao, Huang, Cheng: Efficient Generalization Improvement Guided by Random Weight Perturbation (arXiv
2211.11489), section 4: Gaussian noise e with a standard deviation of γ times the filter's norm, and the
gradient (1 − α) ∇L(θ) + α ∇L(θ + e). Reference implementation: nblt/RWP, where a one-dimensional tensor is one
filter.

Where we differ: the default is α = 1, which takes only the perturbed loss, by one evaluation and without a
closure, as their single-sample convolution does. α < 1 evaluates the same batch at both points; the authors use
separate processes with separate batches. Draws are a function of (seed, step). Otherwise as in mergopt.py.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mergekit_lab.optim.noise import Noise, draw_noise, hash_bits
from mergekit_lab.optim.offset import OffsetOptimizer
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters, mix_gradients
from mergekit_lab.optim.pgn import interpolate
from mergekit_lab.optim.precision import widen_dtype
from mergekit_lab.optim.wrapper import Closure
from mergekit_lab.ranges import NotNegative, Proportion


def filter_norms(weight: Tensor) -> Tensor:
    """The L2 norm of each filter, broadcastable over `weight`, in float32 at least.

    A filter is the slice at one index of dimension 0. A vector or a number is one filter.
    """
    dtype = widen_dtype(weight)
    if weight.ndim < 2:
        return torch.linalg.vector_norm(weight, dtype=dtype)
    return torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True, dtype=dtype)


def add_filter_noise(params: list[Tensor], seed: int | torch.Generator, gamma: float) -> None:
    """Add γ ‖filter‖ z to `params` in place, z standard normal; `seed` as in `draw_noise`."""
    for group, z in draw_noise(params, seed, Noise("gaussian", scale=gamma)):
        torch._foreach_mul_(z, [filter_norms(p) for p in group])
        torch._foreach_add_(group, z)


class RWP(OffsetOptimizer):
    """Random weight perturbation around any base optimizer. One evaluation per step, or two with α < 1.

    With a closure or without, in eval mode or train mode: see `OffsetOptimizer`. Train mode needs α = 1.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        gamma: γ ≥ 0, the noise's standard deviation divided by the filter's norm; 0 is the base optimizer.
        alpha: α in [0, 1], the weight of the perturbed loss; the authors use 0.5. 0 is the base optimizer.
        seed: a step's offset is a function of (`seed`, number of steps done), the parameters' layout and the
            type of device. Ranks with the same seed take the same offset.

    Attributes:
        steps_done: base steps so far.

    Raises:
        InputError: a hyper-parameter is out of range; `step` is called without a closure in eval mode or with α
            < 1; a gradient is sparse.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ("gamma", "alpha")
    recordable = True

    def __init__(
        self,
        named_parameters: Parameters,
        base: BaseOptimizer,
        gamma: NotNegative = 0.01,
        alpha: Proportion = 1.0,
        seed: int = 0,
    ) -> None:
        self.gamma = gamma
        self.alpha = alpha
        super().__init__(named_parameters, base, seed)

    @property
    def evaluations_per_step(self) -> int:  # type: ignore[override]
        return 2 if self.gamma > 0 and 0 < self.alpha < 1 else 1

    def draw(self, candidate: int) -> tuple[int, float]:
        return hash_bits(self.seed, self.steps_done, "offset"), 1.0

    def add_offset(self, params: list[Tensor], candidate: int) -> bool:
        if self.gamma == 0 or self.alpha == 0:
            return False
        seed, _ = self.draw(candidate)
        add_filter_noise(params, seed if self.replay is None else self.replay.generator, self.gamma)
        return True

    def explore(self, closure: Closure) -> Any:
        if self.evaluations_per_step == 1:
            return super().explore(closure)
        loss = self.evaluate(closure)
        first = {p: p.grad.clone() for p in self.parameters if p.grad is not None}  # DDP may reuse their memory
        self._move()
        self.evaluate(closure, 1)
        mix_gradients(first, lambda _, one, other: interpolate(one, other, self.alpha))
        return loss
