"""Hydra's own sweeper, ending with one comparison over all jobs, also when some of them failed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore


@dataclass
class ComparisonSweeperConf(BasicSweeperConf):
    _target_: str = "hydra_plugins.mergekit_lab.comparison_sweeper.ComparisonSweeper"


ConfigStore.instance().store(
    group="hydra/sweeper", name="comparison", node=ComparisonSweeperConf, provider="mergekit_lab"
)


class ComparisonSweeper(BasicSweeper):
    """`BasicSweeper`, then the report of `mergekit_lab.stages.report`."""

    def sweep(self, arguments: list[str]) -> Any:
        from mergekit_lab.stages.report import report_sweep

        try:
            return super().sweep(arguments)
        finally:
            out = Path(self.config.hydra.sweep.dir)
            jobs = sorted((p for p in out.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
            if jobs:
                report_sweep(jobs, out)
