"""The time of a training, without validation: a budget of seconds, and what steps cost."""

from __future__ import annotations

import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

NEVER = 10**9
"""Steps between validations, and batches of an epoch, where a clock decides instead."""
_WARM_UP = 5


class Stopwatch:
    """Seconds between `start` and `pause`, added up. Both wait for the device.

    Attributes:
        total: seconds up to the last pause.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._since: float | None = None

    def read(self) -> float:
        """Seconds so far."""
        return self.total if self._since is None else self.total + time.monotonic() - self._since

    def start(self, trainer: lightning.Trainer) -> None:
        """Run on, unless it runs."""
        if self._since is None:
            _wait_for(trainer.strategy.root_device)
            self._since = time.monotonic()

    def pause(self, trainer: lightning.Trainer) -> None:
        """Stop, if it runs."""
        _wait_for(trainer.strategy.root_device)
        self.total, self._since = self.read(), None


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock(Callback):
    """Stops after a number of seconds of training, counted over interruptions.

    Validation does not count. Checkpoints hold the seconds spent, so a resumed run has the rest. Validation
    runs at equal parts of the budget, the last time at its end.

    Results under a clock are not reproducible bit for bit: the number of steps depends on the machine and its
    load. Processes that train together follow the clock of the first, read after each step.

    Args:
        seconds: the budget, positive.
        validations: how often validation runs, at least 1.
    """

    def __init__(self, seconds: float, validations: int) -> None:
        self.seconds = seconds
        self.validations = validations
        self._watch = Stopwatch()
        self._validated = 0
        self._agreed: float | None = None

    @property
    def fraction(self) -> float:
        """The part of the budget that has been spent, in [0, 1]."""
        return min(1.0, self._watch.read() / self.seconds) if self._agreed is None else self._agreed

    def _agree(self, trainer: lightning.Trainer) -> None:
        if trainer.world_size > 1:
            self._agreed = None
            self._agreed = trainer.strategy.broadcast(self.fraction)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._agree(trainer)
        trainer.should_stop = self.fraction >= 1
        self._watch.start(trainer)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._agree(trainer)
        part = self.fraction
        trainer.should_stop = part >= 1
        due = int(part * self.validations)
        trainer.val_check_batch = 1 if due > self._validated else NEVER
        self._validated = max(due, self._validated)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._watch.pause(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._watch.start(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"spent": self._watch.read(), "validated": self._validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._watch.total = state_dict["spent"]
        self._validated = state_dict["validated"]


class TrainingCost(Callback):
    """Measures a training while it runs. The speed leaves out the first five steps.

    Attributes:
        measured: `steps_per_second` without validation, and the peak of allocated `gigabytes` (10⁹ bytes) on a
            CUDA device. Empty after too few steps.
    """

    def __init__(self) -> None:
        self.measured: dict[str, float] = {}
        self._steps = 0
        self._watch = Stopwatch()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self._steps >= _WARM_UP:
            self._watch.start(trainer)

    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Pause until the next step begins: validation, and checkpoints after it, do not count."""
        self._watch.pause(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._watch.pause(trainer)
        if self._steps > _WARM_UP and self._watch.total > 0:
            self.measured["steps_per_second"] = round((self._steps - _WARM_UP) / self._watch.total, 4)
        if pl_module.device.type == "cuda":
            self.measured["gigabytes"] = torch.cuda.max_memory_allocated(pl_module.device) / 1e9
