"""The step of the SAM family: the first gradient moves the weights, the second is for the base."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters, mix_gradients
from mergekit_lab.optim.sharded import is_sharded
from mergekit_lab.optim.wrapper import Closure, WrappedOptimizer
from mergekit_lab.ranges import NotNegative, Share


class AscentOptimizer(WrappedOptimizer):
    """Two evaluations per step: the gradient at θ perturbs the weights, and the base uses the gradient there.

    The base always steps from θ, which is restored from a copy. With ρ = 0 there is one evaluation, and the
    result is the base optimizer's, bit for bit. Extra memory: a copy of the parameters that have a gradient.

    Args:
        named_parameters, base: see `WrappedOptimizer`.
        rho: radius of the perturbation, ≥ 0. A group of parameters may have its own. If the base maximizes the
            loss, the perturbation descends.
        ascent_fraction: value of `batch_fraction` during the first of two evaluations, in (0, 1]. A closure
            that reads it makes the ascent cheaper.
        sync_ascent: whether processes share the gradient of the ascent. With False (m-SAM), each process
            ascends its own, which needs `attach`. The gradient for the base is always shared.

    Raises:
        InputError: a hyper-parameter is out of range; `step` is called without a closure; a gradient is sparse.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ("rho",)
    group_settings: ClassVar[tuple[str, ...]] = ("rho",)
    evaluations_per_step = 2

    def __init__(
        self,
        named_parameters: Parameters,
        base: BaseOptimizer,
        rho: NotNegative = 0.05,
        ascent_fraction: Share = 1.0,
        sync_ascent: bool = True,
    ) -> None:
        self.rho = rho
        self.ascent_fraction = ascent_fraction
        self.sync_ascent = sync_ascent
        super().__init__(named_parameters, base)

    def validate(self) -> None:
        if not self.sync_ascent and any(is_sharded(p) for p in self.parameters):
            raise InputError(
                f"{type(self).__name__}(sync_ascent=False) needs whole gradients on every process, and "
                "fully_shard leaves each a part: set sync_ascent=True, or use DistributedDataParallel"
            )

    @property
    def gradient_evaluations(self) -> Fraction:
        return 1 + Fraction(str(self.ascent_fraction)) if self.perturbs else Fraction(1)

    @property
    def perturbs(self) -> bool:
        """Whether the step perturbs the weights. If not, it is the base optimizer's."""
        return any(rho > 0 for rho in self.list_values("rho"))

    def compute_perturbation(self, params: list[Tensor], grads: list[Tensor]) -> Sequence[Tensor]:
        """The perturbation to add to `params` for the second evaluation.

        Args:
            params, grads: the parameters that have a gradient, and their gradients at θ. They are not changed.

        Returns:
            One tensor per parameter, same order and shapes.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute_perturbation(params, grads)")

    def mix(self, params: list[Tensor], first: list[Tensor], second: list[Tensor]) -> Sequence[Tensor]:
        """The gradient for the base. A class that overrides this keeps the first gradients in memory.

        Args:
            params: the parameters that have both gradients.
            first, second: their gradients at θ and at the perturbed point.
        """
        return second

    def update(self, closure: Closure | None) -> Any:
        """Make two evaluations and a step of the base. Earlier gradients are not used."""
        if closure is None:
            name = type(self).__name__
            raise InputError(
                f"{name}.step() needs a closure, because {name} evaluates the loss twice: pass a function "
                "that runs forward and backward and returns the loss. Gradient scalers "
                "(torch.amp.GradScaler, Lightning's precision='16-mixed') step without one: use "
                "precision='bf16-mixed' or float32"
            )
        if not self.perturbs:
            loss = self.evaluate(closure)
        else:
            loss = self.evaluate(closure, fraction=self.ascent_fraction, sync=self.sync_ascent)
            try:
                first = self._ascend()
                if first is not None:
                    self.evaluate(closure, 1)
            finally:
                self.theta.restore()
            mix_gradients(first or {}, self.mix)
        self.base.step()
        return loss

    def _ascend(self) -> dict[Tensor, Tensor] | None:
        """Move to the perturbed point, and return the first gradients if `mix` reads them.

        Apart from `update` so that the perturbation, and gradients that are not mixed, are freed before the
        second evaluation.

        Returns:
            None if no parameter has a gradient.
        """
        params = [p for p in self.parameters if p.grad is not None]
        if not params:
            return None
        grads = [p.grad for p in params if p.grad is not None]
        first: dict[Tensor, Tensor] = {}
        if type(self).mix is not AscentOptimizer.mix:
            first.update(zip(params, (g.clone() for g in grads), strict=True))  # DDP may reuse their memory
        shift = self.compute_perturbation(params, grads)
        self.theta.save(params)
        torch._foreach_add_(params, list(shift))
        return first
