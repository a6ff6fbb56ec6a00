"""Training that results in the average of its weights over steps.

`Averaging` comes before the optimizer whose steps it averages: `class WASAM(Averaging, SAM)`.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.optim.precision import widen
from mergekit_lab.optim.saved_weights import SavedWeights
from mergekit_lab.optim.sharded import take_parts
from mergekit_lab.optim.wrapper import Closure, WrappedOptimizer
from mergekit_lab.ranges import Count, Proportion


def fold_in(average: list[Tensor], weights: list[Tensor], part: float | Tensor) -> None:
    """Add new weights to an average, in place: a += part · (w − a).

    Args:
        part: 1 / (n + 1) after n weights; a number, or a 0-d tensor on their device.
    """
    if not isinstance(part, Tensor):
        torch._foreach_lerp_(average, weights, part)
        return
    change = torch._foreach_sub(weights, average)
    torch._foreach_mul_(change, part)
    torch._foreach_add_(average, change)


class Averaging(WrappedOptimizer):
    """Keeps the average of θ over steps. In eval mode the weights are that average.

    The optimizer starts in eval mode. There `step(closure)` does everything: it restores θ, steps, adds the new
    θ to the average, and sets the weights to the average. So code that evaluates or saves the model between two
    steps gets the average. In train mode, between `train()` and `eval()`, the weights are θ, and the loop owns
    the gradients. If a step takes one evaluation, micro-batches accumulate as usual, with or without a closure
    for the last. Until averaging starts, the weights are θ in both modes.

    Save the model's and this optimizer's state dicts in the same mode. In eval mode the optimizer's includes θ,
    from which the next step starts after loading. So a run resumes bit for bit in either mode.

    Running statistics of normalizations belong to θ. Renew them with `torch.optim.swa_utils.update_bn` in eval
    mode, before evaluating the average.

    Extra memory: the average in float32 or wider, and a copy of θ while the weights are the average.

    Attributes:
        steps_done: base steps so far.
        averaged_count: number of steps in the average.
        training: whether the optimizer is in train mode.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = (
        "steps",
        "start",
        "every",
        "steps_done",
        "averaged_count",
        "training",
    )
    saved_tensors: ClassVar[tuple[str, ...]] = ("average", "aside")
    average: dict[Tensor, Tensor]
    aside: dict[Tensor, Tensor]
    takes_sharded = True

    def begin(self, steps: Count, start: Proportion, every: Count) -> None:
        """Store a subclass's arguments, before its constructor calls the optimizer's."""
        self.steps = steps
        self.start = start
        self.every = every
        self.steps_done = 0
        self.averaged_count = 0
        self._mode = {"training": False}
        self._memory = SavedWeights()

    @property
    def training(self) -> bool:
        return self._mode["training"]

    @training.setter
    def training(self, value: bool) -> None:
        self._mode["training"] = value

    @property
    def drops_gradients(self) -> bool:  # type: ignore[override]
        return not self.training or self.evaluations_per_step > 1

    @torch.no_grad()
    def train(self) -> None:
        """Set the weights to θ, unless they are θ."""
        self.training = True
        self._go_to_theta()

    def _go_to_theta(self) -> None:
        if self.aside:
            torch._foreach_copy_(take_parts(self.aside), take_parts(self.aside.values()))
            self.aside.clear()
            torch.clear_autocast_cache()

    @torch.no_grad()
    def eval(self) -> None:
        """Set the weights to the average, if it has started."""
        self.training = False
        if self.average and not self.aside:
            params = list(self.average)
            self.aside.update(zip(params, self._memory.refill(params), strict=True))
            torch._foreach_copy_(take_parts(self.average), take_parts(self.average.values()))
            torch.clear_autocast_cache()

    @contextmanager
    def show_average(self) -> Iterator[None]:
        """Set the weights to the average within the block, and restore them after it."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            if was_training:
                self.train()

    def release(self) -> None:
        super().release()
        self._memory.release()

    def plan(self) -> Hashable:
        plan = super().plan()
        taking = self._is_taken(self.steps_done + 1)
        begins = taking and not self.average
        return None if plan is None or begins else (plan, taking, bool(self.average), bool(self.aside))

    def prepare_step(self) -> None:
        super().prepare_step()
        assert self.replay is not None
        self.replay.factor.fill_(1 / (self.averaged_count + 1))

    def count_step(self) -> None:
        super().count_step()
        self.steps_done += 1
        self.averaged_count += self._is_taken(self.steps_done)

    def update(self, closure: Closure | None) -> Any:
        in_train_mode = self.training
        if closure is None and not in_train_mode and self.evaluations_per_step == 1:
            raise InputError(
                f"{type(self).__name__}.step() without a closure needs train mode, else the gradient may be "
                "that of the average: call optimizer.train() before the forward pass, or pass a closure "
                "(Lightning does, except with precision='16-mixed': use 'bf16-mixed')"
            )
        self._go_to_theta()
        try:
            loss = super().update(closure)
            self.steps_done += 1
            self._take_in()
        finally:
            if not (in_train_mode and self.stays_in_train_mode):
                self.eval()
        return loss

    def _is_taken(self, step: int) -> bool:
        """Whether the weights after so many steps are part of the average."""
        since = step - int(Fraction(str(self.start)) * self.steps)  # 0.29 · 100 is 28.99… in floats
        return since >= 0 and since % self.every == 0

    def _take_in(self) -> None:
        if not self._is_taken(self.steps_done):
            return
        params = [p for p in self.parameters if p.requires_grad]
        new = [p for p in params if p not in self.average]
        old = [p for p in params if p in self.average]
        if old:
            weights = widen([p.detach() for p in old])
            part = 1 / (self.averaged_count + 1) if self.replay is None else self.replay.factor
            fold_in([self.average[p] for p in old], weights, part)
        self.average.update({p: w.clone() for p, w in zip(new, widen([p.detach() for p in new]), strict=True)})
        self.averaged_count += 1
