"""Our optimizers in the `Trainer` of transformers: it saves and evaluates the weights that should be kept.

`Trainer` calls `optimizer.train()` before every forward pass and `optimizer.eval()` before an evaluation. But
it saves right after a step, when an optimizer in train mode is already at its next offset point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mergekit_lab.errors import InputError
from mergekit_lab.optim.checks import unwrap
from mergekit_lab.optim.wrapper import WrappedOptimizer

if TYPE_CHECKING:
    from transformers import TrainerCallback


def make_trainer_callback() -> TrainerCallback:
    """A callback for `Trainer(..., optimizers=(optimizer, scheduler), callbacks=[make_trainer_callback()])`.

    After every step and at the end of training it calls the optimizer's `eval()`. The model then holds θ
    (`MergOPT`, `RWP`) or the average (`SWA`), and `Trainer` saves that. Other optimizers are not touched.

    Raises:
        InputError: when training begins, if the optimizer evaluates more than once per step, because `Trainer`
            steps without a closure.
    """
    from transformers import TrainerCallback

    class KeptWeights(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = _find_ours(kwargs.get("optimizer"))
            if optimizer is None:
                return
            if optimizer.evaluations_per_step > 1:
                raise InputError(
                    f"{type(optimizer).__name__} evaluates {optimizer.evaluations_per_step} times per step, "
                    "but transformers' Trainer evaluates once: use Lightning or your own loop, or take "
                    "MergOPT, RWP or SWA with one evaluation per step"
                )
            optimizer.stays_in_train_mode = False

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if (optimizer := _find_ours(kwargs.get("optimizer"))) is not None:
                optimizer.eval()

        on_train_end = on_step_end

    return KeptWeights()


def _find_ours(optimizer: Any) -> WrappedOptimizer | None:
    """The optimizer inside accelerate's wrapper, if it is one of ours."""
    optimizer = unwrap(optimizer)
    return optimizer if isinstance(optimizer, WrappedOptimizer) else None
