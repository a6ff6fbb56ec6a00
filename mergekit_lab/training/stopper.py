"""Stop on a signal: finish the current step and write a checkpoint before training ends."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import lightning
from lightning.pytorch.callbacks import Callback

from mergekit_lab.training.module import FinetuneModule

log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ONE_WISH = 2.0
"""Signals within these seconds count once: a terminal, a scheduler and the parent process may each send one."""
_AGREE = 10
"""Steps after which processes that train together ask each other whether one was told to stop."""


class Stopped(BaseException):
    """Training ended early. It is no KeyboardInterrupt, because Lightning turns that into an exit of the
    process.
    """


class Stopper(Callback):
    """Ends training after the step in which SIGINT or SIGTERM came, with a checkpoint to resume from.

    Lightning validates only after a step, never when it resumes. So a validation that is due runs first and
    writes the checkpoint. After the last step there is none to write: training resumes from the one before.
    Signals within two seconds count once; a later one stops immediately.

    Args:
        checkpoint: path of the checkpoint.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._wanted = threading.Event()
        self._first = 0.0
        self._validates_first = False

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Handle the signals within the block, and restore earlier handlers after it. Works in the main thread
        only.
        """
        before = self._set_handlers()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _set_handlers(self) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._take) for number in _SIGNALS}

    def _take(self, number: int, frame: Any) -> None:
        if self._wanted.is_set():
            if time.monotonic() - self._first < _ONE_WISH:
                return
            raise KeyboardInterrupt
        log.info("%s: stopping after this step", signal.Signals(number).name)
        self._first = time.monotonic()
        self._wanted.set()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Replace the handler that Lightning has just set, which ends training without this checkpoint."""
        self._set_handlers()

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: lightning.Trainer, pl_module: FinetuneModule, *_: Any
    ) -> None:
        together = trainer.world_size > 1
        if together and trainer.global_step % _AGREE:
            return
        wanted = self._wanted.is_set()
        if together:
            wanted = trainer.strategy.reduce_boolean_decision(wanted, all=False)
        if not wanted:
            return
        if trainer.should_stop or trainer.global_step == trainer.max_steps:
            log.info("stopped before the last validation; the same command continues from the one before it")
            raise Stopped
        if trainer.global_step % trainer.val_check_batch == 0:  # type: ignore[operator]
            self._validates_first = True
            return
        pl_module.end_step()
        trainer.save_checkpoint(self.checkpoint, weights_only=False)
        self._stop(trainer)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._validates_first:
            self._stop(trainer)

    def _stop(self, trainer: lightning.Trainer) -> NoReturn:
        log.info("stopped at step %d; the same command continues from there", trainer.global_step)
        raise Stopped
