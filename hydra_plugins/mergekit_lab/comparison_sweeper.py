"""Hydra's own sweeper with what jobs share made once and first, and one comparison over all jobs at the end.

The comparison is written also when some of them failed.
"""

import json
import logging
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf, open_dict

log = logging.getLogger(__name__)
_NEED_NOTHING = {
    "finetuning",
    "optimizer",
    "optimizer_of",
    "training",
    "curvature",
    "search",
    "merger",
    "mergers",
}
"""Keys that decide nothing of what a job needs from elsewhere."""


@dataclass
class ComparisonSweeperConf(BasicSweeperConf):
    _target_: str = "hydra_plugins.mergekit_lab.comparison_sweeper.ComparisonSweeper"


ConfigStore.instance().store(
    group="hydra/sweeper", name="comparison", node=ComparisonSweeperConf, provider="mergekit_lab"
)


class ComparisonSweeper(BasicSweeper):
    """`BasicSweeper` after `runs.plan`, and before the report of `runs.report`.

    A launcher that works on jobs at a time gets the trainings first, one a job, so that no job waits for
    another's expert; under `basic` whoever comes first trains. What an experiment sweeps over
    (`hydra.sweeper.params`) gives way to the command line.
    """

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None = None) -> None:
        super().__init__(max_batch_size, params)
        self._composed: set[tuple[str, ...]] = set()
        self._asked = 0
        """How many jobs the sweep has."""

    def sweep(self, arguments: list[str]) -> Any:
        before = self._list_begun()
        given = {argument.lstrip("+~").split("=")[0] for argument in arguments}
        self.params = {name: values for name, values in (self.params or {}).items() if name not in given}
        self._refuse_missing(arguments)
        if "suite" in self.config and self.config.dry_run:
            return self._print_plan(arguments)
        given_up = self._note_folder_for_failures()
        try:
            return self._launch_all(arguments)
        finally:
            shutil.rmtree(given_up, ignore_errors=True)
            self._tell_launcher("dismiss")
            try:
                if not isinstance(sys.exception(), KeyboardInterrupt):
                    self._compare(before, arguments)
            finally:
                self._tell_launcher("close")

    def _note_folder_for_failures(self) -> Path:
        """Where this sweep notes what it does not try again; every job has it in its environment."""
        from mergekit_lab.runs.given_up import SHARED, VARIABLE, name_folder

        for left in Path(self.config.hydra.sweep.dir, SHARED).glob("*/failure.json"):
            left.unlink(missing_ok=True)  # of an earlier sweep, whose trainings had other numbers
        self._given_up = name_folder(Path(self.config.hydra.sweep.dir))
        quoted = str(self._given_up).replace("\\", r"\\").replace("'", r"\'")
        with open_dict(self.config):
            self.config.hydra.overrides.hydra.append(f"+hydra.job.env_set.{VARIABLE}='{quoted}'")
        return self._given_up

    def _tell_launcher(self, what: str) -> None:
        """What a launcher with workers of its own knows; `isinstance` fails, for Hydra loads plugins twice."""
        method = getattr(self.launcher, what, None)
        if method is not None:
            method()

    def _refuse_missing(self, arguments: list[str]) -> None:
        """Ask once for all jobs whether data and weights can be had: asked by each, it takes a second a job."""
        if "suite" not in self.config:
            return
        deciding = [
            override
            for override in self._parse(arguments)
            if re.split(r"[.@/]", override.get_key_element())[0] not in _NEED_NOTHING
            and (override.is_discrete_sweep() or not override.is_sweep_override())
        ]
        configs = [self.config]
        if any(o.is_sweep_override() or o.get_key_element() in self.params for o in deciding):
            load = self.hydra_context.config_loader.load_sweep_config
            jobs = [job for batch in self.split_arguments(deciding, None) for job in batch]
            configs = [load(self.config, list(overrides)) for overrides in jobs]
        if not any(map(_needs_others, configs)):
            return
        from mergekit_lab.errors import InputError
        from mergekit_lab.runs.fetch import refuse_missing

        try:
            refuse_missing(*configs)
        except InputError as error:
            raise CompactHydraException(str(error)) from error

    def _launch_all(self, arguments: list[str]) -> Any:
        self._tell_launcher("ready")
        jobs = self.list_jobs(arguments)
        self._asked = len(jobs)
        self._train_first(jobs)
        return super().sweep(arguments)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Jobs that `make_runs` has composed are known to be legal: a fifth of a second each."""
        super().validate_batch_is_legal([job for job in batch if tuple(job) not in self._composed])

    def _parse(self, arguments: Sequence[str]) -> list[Override]:
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        return parser.parse_overrides([*self._parse_config(), *arguments])

    def list_jobs(self, arguments: Sequence[str]) -> list[list[str]]:
        return [job for batch in self.split_arguments(self._parse(arguments), None) for job in batch]

    def make_runs(self, jobs: Sequence[Sequence[str]]) -> dict[int, Any]:
        """The runs by job; a job that its own check will refuse has none."""
        from mergekit_lab.errors import InputError
        from mergekit_lab.runs.compare import check_slice
        from mergekit_lab.runs.entry import make_run

        shared: dict[str, Any] = {}
        runs = {}
        for number, overrides in enumerate(jobs):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            self._composed.add(tuple(overrides))
            choices = dict(config.hydra.runtime.choices)
            said: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            with open_dict(config):
                del config["hydra"]
            try:
                check_slice(config)
                runs[number] = make_run(config, Path(), choices, said, shared)
            except InputError as error:
                log.warning(f"#{number} will be refused: {error}")
        return runs

    def _print_plan(self, arguments: list[str]) -> None:
        from mergekit_lab.runs.plan import describe_plan

        runs = self.make_runs(self.list_jobs(arguments))
        if runs:
            print(describe_plan(list(runs.values())))

    def _train_first(self, jobs: Sequence[Sequence[str]]) -> None:
        """Each shared training once; what fails is named by the jobs that need it, which do not try again."""
        from mergekit_lab.runs.given_up import SHARED, give_up
        from mergekit_lab.runs.plan import list_unmade, plan_shared_training
        from mergekit_lab.schema.stages import list_stages

        here = isinstance(self.launcher, BasicLauncher)
        if (
            here
            or "suite" not in self.config
            or self.config.only is not None
            or "finetune" not in list_stages(self.config)
        ):
            return
        runs = self.make_runs(jobs)
        numbers = list(runs)
        works = plan_shared_training(list(runs.values()))
        if not works or len(jobs) < 2:
            return
        log.info(f"{len(works)} trainings first, for {len(jobs)} jobs")
        trainings = [
            [
                *jobs[numbers[work.job]],
                "stage=[finetune,curvature]",
                *([] if work.only is None else [f"only=[{work.only}]"]),
                f"hydra.sweep.subdir={SHARED}/{number}",
            ]
            for number, work in enumerate(works)
        ]
        try:
            self.launcher.launch(trainings, initial_job_idx=0)
        except Exception:  # as submitit has it for a process that died
            log.exception("not all trainings have returned")
        for number, work in enumerate(works):
            job = f"{SHARED}/{number}"
            for node in list_unmade(runs[numbers[work.job]], work):
                message = f"{node.label} ({node.kind} {node.key}) could not be made in {job}, once for all jobs"
                give_up(
                    node.name, f"{message} of this sweep that need it: {self._read_reason(job)}", self._given_up
                )

    def _read_reason(self, job: str) -> str:
        file = Path(self.config.hydra.sweep.dir, job, "failure.json")
        try:
            return str(json.loads(file.read_text())["error"])
        except (OSError, ValueError):
            return "its process died"

    def _list_begun(self) -> dict[Path, int]:
        """Jobs' folders, and when each was begun, by the clock of the file system."""
        marks = Path(self.config.hydra.sweep.dir).glob("*/.hydra/overrides.yaml")
        return {m.parents[1]: m.stat().st_mtime_ns for m in marks if m.parents[1].name.isdigit()}

    def _compare(self, before: dict[Path, int], arguments: list[str]) -> None:
        """One report over the jobs of this sweep, those too that could not begin.

        The folder may hold jobs of earlier sweeps, which have not been begun anew. No other clock is asked:
        that of a file server differs from this machine's.
        """
        if "suite" not in self.config:  # another program's sweep
            return
        from mergekit_lab.errors import InputError
        from mergekit_lab.runs.compare import report_runs

        try:
            out, now = Path(self.config.hydra.sweep.dir), self._list_begun()
            jobs = {job for job, when in now.items() if before.get(job) != when}
            if jobs:
                jobs |= {out / str(n) for n in range(self._asked)} - now.keys()
                report_runs(self.config, sorted(jobs, key=lambda p: int(p.name)), out, arguments, sweep=True)
        except InputError as error:
            log.warning(f"left out of the comparison: {error}")
        except Exception:
            log.exception("the comparison of the jobs could not be written")


def _needs_others(config: Any) -> bool:
    """Whether a configuration names what is published elsewhere; found out without importing torch."""
    weights = config.get("base") or config.backbone.get("weights")
    if config.experts or (weights is not None and not str(weights).startswith("asset:")):
        return True
    return any(str(task.get("_target_")).endswith("HubImages") for task in config.suite.tasks.values())
