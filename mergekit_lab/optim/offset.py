"""The step of methods that take the gradient at a random point near θ. A closure is optional."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.optim.noise import to_signed
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters
from mergekit_lab.optim.wrapper import Closure, WrappedOptimizer


class OffsetOptimizer(WrappedOptimizer):
    """The gradient is taken at θ plus a random offset, and the base steps from θ. One evaluation per step.

    With a closure, `step(closure)` does everything: it moves the weights to the offset point, drops the
    gradients, calls the closure once, restores θ, and lets the base step.

    Without a closure, the weights are at the offset point during training. `train()` moves them there, and
    `eval()` back to θ. Both may be called at any time, except between a forward pass and its backward. In train
    mode `step()` restores θ, lets the base step, and moves to the next offset point, unless
    `stays_in_train_mode` is False. The loop owns the gradients, so micro-batches accumulate as usual. There
    `step(closure)` calls the closure at the current weights, without zeroing gradients. Both ways give the same
    weights. The optimizer starts in eval mode.

    Call `eval()` before evaluating, saving or loading weights, because in train mode the model holds the offset
    point. `state_dict()` is the same in both modes.

    The offset covers the parameters that require a gradient. Extra memory: one copy of them.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        seed: a step's offset is a function of (`seed`, number of steps done), the parameters' layout and the
            type of device. Ranks with the same seed take the same offset.

    Attributes:
        steps_done: base steps so far.

    Raises:
        InputError: a hyper-parameter is out of range; `step` is called in eval mode without a closure; a
            gradient is sparse.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ("seed", "steps_done")

    def __init__(self, named_parameters: Parameters, base: BaseOptimizer, seed: int = 0) -> None:
        self.seed = seed
        self.steps_done = 0
        self._unmoved: list[tuple[Tensor, int]] = []
        super().__init__(named_parameters, base)

    @property
    def drops_gradients(self) -> bool:  # type: ignore[override]
        return not self.theta.held

    def draw(self, candidate: int) -> tuple[int, float]:
        """The part of the next step's offset that the host decides: a 64-bit seed, and a factor on its size.

        Args:
            candidate: index of one of several offsets of the step.
        """
        raise NotImplementedError(f"{type(self).__name__} must define draw(candidate)")

    def prepare_step(self) -> None:
        assert self.replay is not None
        seed, factor = self.draw(0)
        self.replay.generator.manual_seed(seed)
        self.replay.seed.fill_(to_signed(seed))
        self.replay.factor.fill_(factor)

    def count_step(self) -> None:
        self.steps_done += 1

    def add_offset(self, params: list[Tensor], candidate: int) -> bool:
        """Add the next step's offset to `params` in place. Returns False if there is none.

        Args:
            params: those that require a gradient.
            candidate: index of one of several offsets of the step.
        """
        raise NotImplementedError(f"{type(self).__name__} must define add_offset(params, candidate)")

    def save_and_move(self, params: list[Tensor], candidate: int) -> list[Tensor] | None:
        """Copy θ, then add the offset. Returns the copies, or None if there is no offset."""
        copies = self.theta.save(params)
        return copies if self.add_offset(params, candidate) else None

    @property
    def unmoved_fraction(self) -> float | None:
        """The fraction in [0, 1] of low-precision entries that the last offset did not move: it was under half
        an ulp.

        None if no parameter has low precision, or if the last offset was zero. Reading it waits for the device.
        """
        total = sum(entries for _, entries in self._unmoved)
        return sum(int(same) for same, _ in self._unmoved) / total if total else None

    def train(self) -> None:
        """Move the weights to the next step's offset point, unless they are there.

        Raises:
            InputError: the method evaluates more than once per step, which needs a closure in eval mode.
        """
        if self.evaluations_per_step > 1:
            raise InputError(
                f"{type(self).__name__} evaluates {self.evaluations_per_step} times per step and so has no "
                "train mode: call step(closure) in eval mode, or take the settings with one evaluation"
            )
        if not self.theta.held:
            self._move()

    def eval(self) -> None:
        """Set the weights to θ, unless they are θ."""
        with torch.no_grad():
            self.theta.restore()
        torch.clear_autocast_cache()

    def update(self, closure: Closure | None) -> Any:
        """Step once. Returns the first loss, which is at an offset point unless there is no offset."""
        in_train_mode = self.theta.held
        if closure is None and not in_train_mode:
            name = type(self).__name__
            raise InputError(
                f"{name}.step() without a closure needs train mode, else the gradient is that of θ and no "
                "offset is used: call optimizer.train() before the forward pass, or pass a closure "
                "(Lightning does, except with precision='16-mixed': use 'bf16-mixed')"
            )
        loss = None
        if closure is None:
            self.refuse_sparse_gradients()
        elif in_train_mode:
            loss = self.evaluate(closure, zero=False)
        else:
            try:
                loss = self.explore(closure)
            finally:
                self.eval()
        self.eval()
        self.base.step()
        self.steps_done += 1
        if in_train_mode and self.stays_in_train_mode:
            self.train()
        return loss

    def explore(self, closure: Closure) -> Any:
        """Evaluate at the method's points, leave the gradient for the base, and return the first loss. Starts
        from θ.
        """
        self._move()
        return self.evaluate(closure)

    @torch.no_grad()
    def _move(self, candidate: int = 0) -> None:
        params = [p for p in self.parameters if p.requires_grad]
        self._unmoved.clear()
        copies = self.save_and_move(params, candidate)
        if copies is None:
            return
        torch.clear_autocast_cache()
        for p, before in zip(params, copies, strict=True):
            if torch.finfo(p.dtype).bits < 32:
                self._unmoved.append(((p == before).sum(), p.numel()))
