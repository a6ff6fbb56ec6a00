"""The training curve, and the watch on losses that are not finite; a GPU is not waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from mergekit_lab.backbones.objective import to_list
from mergekit_lab.errors import InputError
from mergekit_lab.training.captured import Replay

OnMetrics = Callable[[dict[str, float], int], None]


@dataclass(frozen=True)
class _Point:
    """A point of the training curve, on its way from the device: loss, learning rate, first bad step."""

    step: int
    values: list[float] | Tensor
    ready: torch.cuda.Event | None = None

    @property
    def arrived(self) -> bool:
        return self.ready is None or self.ready.query()

    def read(self) -> list[float]:
        if self.ready is not None:
            self.ready.synchronize()
        return to_list(self.values)


class RecordedModule(lightning.LightningModule):
    """A module that records its curve, and stops at a loss that is not finite.

    Args:
        tasks: what is learned.
        steps: of the whole training.
        on_metrics: told of every point, with its step.

    Attributes:
        record_every: steps from one point of the curve to the next.
    """

    def __init__(self, tasks: list[str], steps: int, on_metrics: OnMetrics | None) -> None:
        super().__init__()
        self.tasks = tasks
        self.steps = steps
        self.record_every = max(1, steps // 50)
        self.on_metrics = on_metrics
        self.curve: list[dict[str, float]] = []
        self._points: deque[_Point] = deque()
        self._looked_at = -1
        self._first_loss: Tensor | None = None
        self._first_bad = self._done = torch.full((), -1)
        self._replay: Replay | None = None
        self._saved = 0

    def end_step(self) -> None:
        """Record and check the current step's loss, once. Lightning's hook comes only after callbacks have
        saved.
        """
        step = self.global_step
        if step == self._looked_at:
            return
        self._looked_at = step
        assert self._first_loss is not None
        if self._replay is None:
            self._watch(self._first_loss)
        if step % self.record_every == 0 or step == self.steps:
            self._points.append(self._take_point(step))
        self._record_points(wait=step == self.steps)

    def _take_point(self, step: int) -> _Point:
        """The loss of a step and what belongs to it; a GPU is not waited for."""
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        numbers: tuple[Any, ...] = (self._first_loss, rate, self._first_bad)
        if self.device.type != "cuda":
            return _Point(step, [float(each) for each in numbers])
        wide = [torch.as_tensor(each, dtype=torch.float64) for each in numbers]
        on_gpu = torch.stack([each.detach().to(self.device, non_blocking=True) for each in wide])
        on_host = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
        on_host.copy_(on_gpu, non_blocking=True)
        return _Point(step, on_host, torch.cuda.current_stream(self.device).record_event())

    def _record_points(self, *, wait: bool) -> None:
        """Record the points of the training curve that have arrived, or all of them."""
        while self._points and (wait or self._points[0].arrived):
            point = self._points.popleft()
            loss, rate, bad = point.read()
            self._refuse_bad(int(bad))
            self._record({"train_loss": loss, "lr": rate}, point.step)

    def _watch(self, loss: Tensor) -> None:
        """Note on the device the first step whose loss is not finite."""
        self._done += 1
        bad = (self._first_bad < 0) & ~torch.isfinite(loss)
        self._first_bad.copy_(torch.where(bad, self._done, self._first_bad))

    def on_validation_start(self) -> None:
        self._record_points(wait=True)
        self._refuse_bad(int(self._first_bad))

    def on_train_end(self) -> None:
        self._record_points(wait=True)

    def _refuse_bad(self, step: int) -> None:
        """Stop at a step whose loss was not finite, if there is one, before weights that followed are kept."""
        if step < 0:
            return
        schedule: Any = self.lr_schedulers()
        rate = float(schedule.base_lrs[0]) * schedule.lr_lambdas[0](step - 1)
        file = Path(self.trainer.default_root_dir) / "last.ckpt"
        kept = f"the last good checkpoint is {file} of step {self._saved}" if self._saved else (
            "there is no checkpoint from before"
        )  # fmt: skip
        raise InputError(
            f"the loss of {', '.join(self.tasks)} is not finite at step {step} of {self.steps} (learning rate "
            f"{rate:.3g}; {kept}): lower training.lr or raise training.warmup_steps"
        )

    def _record(self, metrics: dict[str, float], step: int) -> None:
        if self.curve and self.curve[-1]["step"] == step:
            self.curve[-1].update(metrics)
        else:
            self.curve.append({"step": step, **metrics})
        if self.on_metrics is not None:
            self.on_metrics(metrics, step)
