"""Tracking with TensorBoard's event files, by tensorboardX: `tensorboard --logdir FOLDER` shows them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergekit_lab.errors import InputError
from mergekit_lab.reporting.tables import Table
from mergekit_lab.reporting.trackers import Start, Tracker, guard

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

    def _begin(self, start: Start) -> Any:
        return self._make(str(start.folder / FOLDER / (start.job_type or start.name)))

    @guard
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._open.add_scalar(name, value, step)

    @guard
    def log_summary(self, table: Table) -> None:
        for row in table.rows:
            for measure, cell in (("average", row.average), ("normalized", row.normalized)):
                if cell.mean is not None:
                    self._open.add_scalar("/".join((*row.group, row.label, measure)), cell.mean)

    @guard
    def log_figure(self, name: str, path: Path | str) -> None:
        import numpy as np
        from PIL import Image

        pixels = np.asarray(Image.open(path, formats=["PNG"]).convert("RGB"))
        self._open.add_image(name, pixels, dataformats="HWC")

    def _end(self) -> None:
        self._open.close()
