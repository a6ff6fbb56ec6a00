"""A LightningModule with the few lines that our optimizers want, and a trainer that keeps quiet."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from mergekit_lab.optim import refuse_accumulation
from mergekit_lab.optim.wrapper import WrappedOptimizer
from optim.problems import Problem


class Lit(lightning.LightningModule):
    """The network of a `Problem`; batches are rows of its data.

    A torch optimizer runs the closure inside its own step, after its hooks: only ours are clipped here.

    Args:
        problem: network and data.
        make: builds the optimizer from named parameters.
        clip: largest norm of the gradient that the weights follow, or None.
    """

    def __init__(self, problem: Problem, make: Callable[..., Any], clip: float | None = None) -> None:
        super().__init__()
        self.problem = problem
        self.net = problem.model
        self.make = make
        self.clip = clip
        self.first_losses: list[float] = []
        self.shown: list[dict[str, Tensor]] = []

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.net.named_parameters())
        refuse_accumulation(optimizer, self.trainer.accumulate_grad_batches)
        if isinstance(optimizer, WrappedOptimizer):
            optimizer.stays_in_train_mode = False
            if self.clip is not None:
                optimizer.base.register_step_pre_hook(self._clip)
        return optimizer

    def _clip(self, *_: Any) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)

    @property
    def optimizer(self) -> Any:
        return self.optimizers(use_pl_optimizer=False)

    def on_train_start(self) -> None:
        if isinstance(self.optimizer, WrappedOptimizer):
            self.optimizer.attach(self.trainer.strategy.model)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.accumulate_grad_batches > 1 and isinstance(self.optimizer, WrappedOptimizer):
            self.optimizer.train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(self.problem.x[batch]), self.problem.y[batch])
        if getattr(self.optimizer, "evaluation", 0) == 0:
            self.first_losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.shown.append(self.problem.copy_weights())


class RepeatedRows:
    """The twelve rows `steps` times over, each time in `parts` parts; resumable, as there is no state."""

    def __init__(self, steps: int, parts: int = 1) -> None:
        self.parts = list(torch.arange(12).chunk(parts)) * steps

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.parts)

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        pass


def fit(module: Lit, steps: int, *, ckpt: Any = None, parts: int = 1, **options: Any) -> lightning.Trainer:
    """Train to step `steps`, validating after every step if `validate` is among the options."""
    validate = options.pop("validate", False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        accumulate_grad_batches=parts,
        logger=False,
        enable_checkpointing=options.pop("enable_checkpointing", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=parts,
        check_val_every_n_epoch=None,
        limit_val_batches=1.0 if validate else 0,
        **options,
    )
    trainer.fit(module, RepeatedRows(steps, parts), RepeatedRows(1), ckpt_path=ckpt, weights_only=True)
    return trainer
