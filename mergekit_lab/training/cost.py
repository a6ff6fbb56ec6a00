"""What training costs: steps per second and memory, without validation."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

_WARM_UP = 5


class TrainingCost(Callback):
    """Measures a training while it runs. The speed leaves out the first five steps.

    Attributes:
        measured: `steps_per_second` without validation, and the peak of allocated `gigabytes` (10⁹ bytes) on a
            CUDA device. Empty after too few steps.
    """

    def __init__(self) -> None:
        self.measured: dict[str, float] = {}
        self._steps = 0
        self._seconds = 0.0
        self._since: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self._since is None and self._steps >= _WARM_UP:
            self._since = self.read_clock(trainer)

    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Pause until the next step begins: validation, and checkpoints after it, do not count."""
        self._pause(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._pause(trainer)
        if self._steps > _WARM_UP and self._seconds > 0:
            self.measured["steps_per_second"] = round((self._steps - _WARM_UP) / self._seconds, 4)
        if pl_module.device.type == "cuda":
            self.measured["gigabytes"] = torch.cuda.max_memory_allocated(pl_module.device) / 1e9

    def _pause(self, trainer: Any) -> None:
        if self._since is not None:
            self._seconds += self.read_clock(trainer) - self._since
            self._since = None

    def read_clock(self, trainer: Any) -> float:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic()
