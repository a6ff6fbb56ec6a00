"""Hydra's own sweeper, ending with one comparison over all jobs, also when some of them failed."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore

log = logging.getLogger(__name__)
_CLOCK_STEP = 2.0  # seconds: file systems keep coarser times than the clock


@dataclass
class ComparisonSweeperConf(BasicSweeperConf):
    _target_: str = "hydra_plugins.mergekit_lab.comparison_sweeper.ComparisonSweeper"


ConfigStore.instance().store(
    group="hydra/sweeper", name="comparison", node=ComparisonSweeperConf, provider="mergekit_lab"
)


class ComparisonSweeper(BasicSweeper):
    """`BasicSweeper`, then the report of `mergekit_lab.stages.report`.

    What an experiment sweeps over (`hydra.sweeper.params`) gives way to the command line.
    """

    def sweep(self, arguments: list[str]) -> Any:
        begun = time.time()
        given = {argument.lstrip("+~").split("=")[0] for argument in arguments}
        self.params = {name: values for name, values in (self.params or {}).items() if name not in given}
        try:
            return super().sweep(arguments)
        finally:
            try:
                self._compare(begun)
            except Exception:
                log.exception("the comparison of the jobs could not be written")

    def _compare(self, begun: float) -> None:
        """One report over the jobs of this sweep; the folder may hold those of earlier ones."""
        from mergekit_lab.stages.report import report_sweep

        out = Path(self.config.hydra.sweep.dir)
        marks = [p / ".hydra" / "overrides.yaml" for p in out.iterdir() if p.name.isdigit()]
        jobs = [m.parents[1] for m in marks if m.is_file() and m.stat().st_mtime >= begun - _CLOCK_STEP]
        if jobs and "suite" in self.config:
            report_sweep(sorted(jobs, key=lambda p: int(p.name)), out)
