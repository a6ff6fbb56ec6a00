"""Hydra's own sweeper with what jobs share made once and first, and one comparison over all jobs at the end.

The comparison is written also when some of them failed.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import open_dict

log = logging.getLogger(__name__)
_CLOCK_STEP = 2.0  # seconds: file systems keep coarser times than the clock
SHARED = "training"
"""The folder, beside those of the jobs, of trainings that several jobs share."""


@dataclass
class ComparisonSweeperConf(BasicSweeperConf):
    _target_: str = "hydra_plugins.mergekit_lab.comparison_sweeper.ComparisonSweeper"


ConfigStore.instance().store(
    group="hydra/sweeper", name="comparison", node=ComparisonSweeperConf, provider="mergekit_lab"
)


class ComparisonSweeper(BasicSweeper):
    """`BasicSweeper` after `stages.plan`, and before the report of `stages.report`.

    A launcher that works on jobs at a time gets the trainings first, one a job, so that no job waits for
    another's expert; under `basic` whoever comes first trains. What an experiment sweeps over
    (`hydra.sweeper.params`) gives way to the command line.
    """

    def sweep(self, arguments: list[str]) -> Any:
        begun = time.time()
        given = {argument.lstrip("+~").split("=")[0] for argument in arguments}
        self.params = {name: values for name, values in (self.params or {}).items() if name not in given}
        jobs = self._jobs(arguments)
        over_tasks = "suite" in self.config
        if over_tasks and self.config.dry_run:
            return self._print_plan(jobs)
        try:
            if over_tasks and not isinstance(self.launcher, BasicLauncher) and self.config.only is None:
                self._train_first(jobs)
            return super().sweep(arguments)
        finally:
            close = getattr(self.launcher, "close", None)
            if close is not None:
                close()
            try:
                self._compare(begun)
            except Exception:
                log.exception("the comparison of the jobs could not be written")

    def _jobs(self, arguments: Sequence[str]) -> list[list[str]]:
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        parsed = parser.parse_overrides([*self._parse_config(), *arguments])
        return [job for batch in self.split_arguments(parsed, None) for job in batch]

    def _contexts(self, jobs: Sequence[Sequence[str]]) -> dict[int, Any]:
        """The runs' contexts by job; a job that its own check will refuse has none."""
        from mergekit_lab.errors import InputError
        from mergekit_lab.stages.config import check
        from mergekit_lab.stages.context import Context

        shared: dict[str, Any] = {}
        found = {}
        for number, overrides in enumerate(jobs):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            choices = dict(config.hydra.runtime.choices)
            with open_dict(config):
                del config["hydra"]
            try:
                check(config)
                found[number] = Context(config, Path(), choices, shared)
            except InputError as error:
                log.warning(f"#{number} will be refused: {error}")
        return found

    def _print_plan(self, jobs: Sequence[Sequence[str]]) -> None:
        from mergekit_lab.stages.plan import Plan

        contexts = self._contexts(jobs)
        if contexts:
            print(Plan.of(list(contexts.values())).text())

    def _train_first(self, jobs: Sequence[Sequence[str]]) -> None:
        from mergekit_lab.stages.plan import shared_training

        contexts = self._contexts(jobs)
        numbers = list(contexts)
        works = shared_training(list(contexts.values()))
        if len(works) < 2 or len(jobs) < 2 or "finetune" not in self._stages():
            return
        log.info(f"{len(works)} trainings first, which {len(jobs)} jobs share")
        self.launcher.launch(
            [
                [
                    *jobs[numbers[work.job]],
                    "stage=null",
                    "stages=[finetune,curvature]",
                    *([] if work.only is None else [f"only=[{work.only}]"]),
                    f"hydra.sweep.subdir={SHARED}/{place}",
                ]
                for place, work in enumerate(works)
            ],
            initial_job_idx=0,
        )

    def _stages(self) -> list[str]:
        return [self.config.stage] if self.config.stage else list(self.config.stages)

    def _compare(self, begun: float) -> None:
        """One report over the jobs of this sweep; the folder may hold those of earlier ones."""
        from mergekit_lab.stages.report import report_sweep

        out = Path(self.config.hydra.sweep.dir)
        marks = [p / ".hydra" / "overrides.yaml" for p in out.iterdir() if p.name.isdigit()]
        jobs = [m.parents[1] for m in marks if m.is_file() and m.stat().st_mtime >= begun - _CLOCK_STEP]
        if jobs and "suite" in self.config:
            report_sweep(sorted(jobs, key=lambda p: int(p.name)), out)
