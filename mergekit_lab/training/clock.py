"""A budget of seconds: a clock that stops training, validates, and reports progress."""

from __future__ import annotations

import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

NEVER = 10**9
"""Steps between validations, and batches of an epoch, where a clock decides instead."""


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
        self._spent = 0.0
        self._since: float | None = None
        self._validated = 0
        self._agreed: float | None = None

    @property
    def fraction(self) -> float:
        """The part of the budget that has been spent, in [0, 1]."""
        return self._measured if self._agreed is None else self._agreed

    @property
    def _measured(self) -> float:
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return min(1.0, (self._spent + running) / self.seconds)

    def _agree(self, trainer: lightning.Trainer) -> None:
        if trainer.world_size > 1:
            self._agreed = trainer.strategy.broadcast(self._measured)

    def _run(self) -> None:
        self._since = time.monotonic()

    def _pause(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if self._since is not None:
            self._spent += time.monotonic() - self._since
        self._since = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._agree(trainer)
        trainer.should_stop = self.fraction >= 1
        self._run()

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._agree(trainer)
        part = self.fraction
        trainer.should_stop = part >= 1
        due = int(part * self.validations)
        trainer.val_check_batch = 1 if due > self._validated else NEVER
        self._validated = max(due, self._validated)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._pause(pl_module.device)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._run()

    def state_dict(self) -> dict[str, Any]:
        return {"spent": self._spent, "validated": self._validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._spent = state_dict["spent"]
        self._validated = state_dict["validated"]
