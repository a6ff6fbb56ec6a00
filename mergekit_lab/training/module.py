"""The LightningModule: an image encoder that trains, frozen heads, any of our optimizers.

Optimizers that evaluate a batch twice call `training_step` twice. Everything here that must happen once a
step (recording the loss, clipping the gradient that the weights follow) is tied to the right one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.classification import MulticlassAccuracy

from mergekit_lab.errors import InputError
from mergekit_lab.optim.wrapper import WrappedOptimizer
from mergekit_lab.training.clock import Clock
from mergekit_lab.training.data import Batch

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
OnMetrics = Callable[[dict[str, float], int], None]


class FinetuneModule(lightning.LightningModule):
    """Cross-entropy of `features @ head.T`, cosine schedule with linear warm-up.

    Args:
        encoder: maps images to features `[N, D]`; all its parameters that require gradients are trained.
        heads: frozen `[C, D]` by task.
        make_optimizer: builds the optimizer from named parameters.
        steps, warmup_steps: of the schedule; the rate is 0 at `steps`.
        clock: if given, it says how far the schedule is, in place of the number of steps done.
        accumulate: micro-batches that the batch of every evaluation is cut into.
        clip_norm: largest L2 norm of the gradient that the weights follow; None does not clip.
        label_smoothing: in [0, 1).
        seed: of everything random in a step (dropout): each step seeds anew from (seed, step), so that a
            resumed run draws what the uninterrupted one does.
        record_every: steps between two points of the training curve.
        on_metrics: called with every point, `(metrics, step)`.
    """

    def __init__(
        self,
        encoder: nn.Module,
        heads: Mapping[str, Tensor],
        make_optimizer: MakeOptimizer,
        *,
        steps: int,
        warmup_steps: int = 0,
        clock: Clock | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        label_smoothing: float = 0.0,
        seed: int = 0,
        record_every: int = 10,
        on_metrics: OnMetrics | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.tasks = list(heads)
        for position, head in enumerate(heads.values()):
            self.register_buffer(f"head_{position}", head.detach().clone(), persistent=False)
        self.accuracies = nn.ModuleList(MulticlassAccuracy(len(h), average="micro") for h in heads.values())
        self.make_optimizer = make_optimizer
        self.steps = steps
        self.warmup_steps = warmup_steps
        self.clock = clock
        self.accumulate = accumulate
        self.clip_norm = clip_norm
        self.label_smoothing = label_smoothing
        self.seed = seed
        self.record_every = record_every
        self.on_metrics = on_metrics
        self.curve: list[dict[str, float]] = []
        self._first_loss: Tensor | None = None

    def logits(self, images: Tensor, task: str) -> Tensor:
        """`[N, C]` for images of one task."""
        head = getattr(self, f"head_{self.tasks.index(task)}")
        return self.encoder(images) @ head.T

    def configure_optimizers(self) -> Any:
        if self.trainer.accumulate_grad_batches > 1:
            raise InputError(
                "Lightning's accumulate_grad_batches would hide all but the last micro-batch from optimizers "
                "that evaluate twice: set training.accumulate, which cuts the batch of every evaluation"
            )
        named = [(name, p) for name, p in self.encoder.named_parameters() if p.requires_grad]
        optimizer = self.make_optimizer(named)
        if isinstance(optimizer, WrappedOptimizer):
            optimizer.stays_in_train_mode = False
            optimizer.base.register_step_pre_hook(self._clip)
        schedule = LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate(self, step: int) -> float:
        done = step if self.clock is None else self.clock.fraction * self.steps
        return cosine_with_warmup(done, self.steps, self.warmup_steps)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        torch.manual_seed((self.seed * 1_000_003 + self.global_step) % (1 << 63))
        self._first_loss = None

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Nothing: Lightning calls this after `training_step`, which has gradients of micro-batches by then."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of the whole batch; its gradient is that of the last micro-batch, the others' are added."""
        self.optimizers(use_pl_optimizer=False).zero_grad()  # type: ignore[union-attr]
        *others, last = self._micro_batches(self._share(batch))
        before = torch.zeros((), device=self.device)
        for part in others:
            loss = self._loss(part)
            with torch.autocast(self.device.type, enabled=False):
                loss.backward()
            before = before + loss.detach()
        loss = self._loss(last)
        if others:
            loss = loss + before
        if self._first_loss is None:
            self._first_loss = loss.detach()
        return loss

    def _micro_batches(self, batch: Batch) -> list[tuple[Batch, int]]:
        """The batch in up to `accumulate` parts, each with the number of images in all of them."""
        total = sum(len(labels) for _, labels in batch.values())
        cut = {
            task: list(zip(x.chunk(self.accumulate), y.chunk(self.accumulate), strict=True))
            for task, (x, y) in batch.items()
        }
        count = max(map(len, cut.values()))
        return [({t: parts[i] for t, parts in cut.items() if i < len(parts)}, total) for i in range(count)]

    def _loss(self, part: tuple[Batch, int]) -> Tensor:
        batch, total = part
        losses = [
            functional.cross_entropy(self.logits(x, task), y, label_smoothing=self.label_smoothing)
            * len(y)
            / total
            for task, (x, y) in batch.items()
        ]
        return torch.stack(losses).sum()

    def _share(self, batch: Batch) -> Batch:
        """The part of the batch that the optimizer asks for: all of it, but in a cheaper ascent."""
        share = getattr(self.optimizers(use_pl_optimizer=False), "batch_fraction", 1.0)
        if share >= 1:
            return batch
        counts = {task: max(1, round(share * len(y))) for task, (_, y) in batch.items()}
        return {task: (x[: counts[task]], y[: counts[task]]) for task, (x, y) in batch.items()}

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if not isinstance(optimizer, WrappedOptimizer):
            self._clip()

    def _clip(self, *_: Any) -> None:
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.encoder.parameters(), self.clip_norm)

    def on_train_start(self) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        if isinstance(optimizer, WrappedOptimizer):
            model = self.trainer.strategy.model
            optimizer.attach(self if model is None else model)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        step = self.global_step
        if step % self.record_every and step != self.steps:
            return
        loss = float(self._first_loss) if self._first_loss is not None else math.nan
        rate = float(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        if not math.isfinite(loss):
            raise InputError(
                f"the loss of {', '.join(self.tasks)} is {loss} at step {step} of {self.steps} (learning rate "
                f"{rate:.3g}): lower training.lr or raise training.warmup_steps"
            )
        self._record({"train_loss": loss, "lr": rate})

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        for task, (images, labels) in batch.items():
            metric = self.accuracies[self.tasks.index(task)]
            metric.update(self.logits(images, task), labels)  # type: ignore[operator]

    def on_validation_epoch_end(self) -> None:
        values = [float(metric.compute()) for metric in self.accuracies]  # type: ignore[operator]
        for metric in self.accuracies:
            metric.reset()  # type: ignore[operator]
        mean = sum(values) / len(values)
        self.log("val_accuracy", mean, logger=False, sync_dist=False)
        if not self.trainer.sanity_checking:
            self._record({"val_accuracy": mean})

    def _record(self, metrics: dict[str, float]) -> None:
        step = self.global_step
        if self.curve and self.curve[-1]["step"] == step:
            self.curve[-1].update(metrics)
        else:
            self.curve.append({"step": step, **metrics})
        if self.on_metrics is not None:
            self.on_metrics(metrics, step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["curve"] = [dict(point) for point in self.curve]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.curve = [dict(point) for point in checkpoint["curve"]]


def cosine_with_warmup(step: float, steps: int, warmup_steps: int) -> float:
    """The factor on the learning rate: 0 to 1 linearly over the warm-up, then a half cosine to 0 at `steps`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
