"""Tracking with TensorBoard's event files, by tensorboardX: `tensorboard --logdir FOLDER` shows them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergekit_lab.errors import InputError
from mergekit_lab.reporting.tables import Table
from mergekit_lab.reporting.trackers import Start, Tracker

FOLDER = "tensorboard"


class TensorBoardTracker(Tracker):
    """Metrics over steps, the leaderboard's means, and figures, in `tensorboard/JOB` of a run's folder.

    Raises `InputError` if tensorboardX is not installed.
    """

    name = "tensorboard"

    def __init__(self) -> None:
        try:
            import tensorboardX
        except ImportError as error:
            raise InputError(
                f"logger=tensorboard needs tensorboardX ({error}): pip install 'mergekit_lab[tensorboard]'"
            ) from None
        self._make: Any = tensorboardX.SummaryWriter
        self._writer: Any = None

    def _begin(self, start: Start) -> None:
        self._writer = None
        self._writer = self._make(str(start.folder / FOLDER / (start.job_type or start.name)))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            with self._warn_of_failures("log"):
                for name, value in metrics.items():
                    self._writer.add_scalar(name, value, step)

    def log_summary(self, table: Table) -> None:
        if self._writer is not None:
            with self._warn_of_failures("log_summary"):
                for row in table.rows:
                    for measure, cell in (("average", row.average), ("normalized", row.normalized)):
                        if cell.mean is not None:
                            self._writer.add_scalar("/".join((*row.group, row.label, measure)), cell.mean)

    def log_figure(self, name: str, path: Path | str) -> None:
        if self._writer is not None:
            with self._warn_of_failures("log_figure"):
                import numpy as np
                from PIL import Image

                self._writer.add_image(
                    name, np.asarray(Image.open(path, formats=["PNG"]).convert("RGB")), dataformats="HWC"
                )

    def finish(self) -> None:
        if self._writer is not None:
            with self._warn_of_failures("finish"):
                self._writer.close()
            self._writer = None
