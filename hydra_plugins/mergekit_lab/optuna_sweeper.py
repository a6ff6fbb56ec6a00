"""`hydra/sweeper=optuna`: a search over whole runs.

Hydra 1.3's plugin of that name needs an Optuna before 3. This one asks the Optuna of today, takes search spaces
as that one does, and ends in one comparison as any sweep.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf

from hydra_plugins.mergekit_lab.comparison_sweeper import ComparisonSweeper

log = logging.getLogger(__name__)
RESULTS = "optimization_results.yaml"


@dataclass
class OptunaSweeperConf:
    """`n_trials` runs, `n_jobs` at once; `sampler` is any of Optuna's, `params` a search space."""

    _target_: str = "hydra_plugins.mergekit_lab.optuna_sweeper.OptunaSweeper"
    n_trials: int = 20
    n_jobs: int = 1
    sampler: dict[str, Any] = field(
        default_factory=lambda: {"_target_": "optuna.samplers.TPESampler", "seed": 0}
    )
    params: dict[str, str] | None = None


ConfigStore.instance().store(
    group="hydra/sweeper", name="optuna", node=OptunaSweeperConf, provider="mergekit_lab"
)


class OptunaSweeper(ComparisonSweeper):
    """Runs whose overrides Optuna chooses, so that what runs return is largest.

    Args:
        n_trials: how many runs, at least 1.
        n_jobs: how many are chosen, and handed to the launcher, at once; at least 1.
        sampler: chooses; with a seed it chooses the same again from the same returns, so that a search that was
            cut goes on from what is in the store.
        params: overrides that sweep, as on the command line.
    """

    def __init__(self, n_trials: int, n_jobs: int, sampler: Any, params: dict[str, str] | None = None) -> None:
        super().__init__(max_batch_size=None, params=params)
        if n_trials < 1 or n_jobs < 1:
            raise CompactHydraException("hydra.sweeper.n_trials and n_jobs must be at least 1")
        self.n_trials = n_trials
        self.n_jobs = n_jobs
        self.sampler = sampler

    def _print_plan(self, arguments: list[str]) -> None:
        raise CompactHydraException("a search has no plan: which runs it wants depends on earlier ones")

    def _launch_all(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        import optuna

        last = {override.get_key_element(): override for override in self._parse(arguments)}
        parsed = list(last.values())
        space = {o.get_key_element(): _make_distribution(o) for o in parsed if o.is_sweep_override()}
        if not space:
            raise CompactHydraException(
                "there is nothing to search: give a key several values, or interval(a,b)"
            )
        ((fixed,),) = self.split_arguments([o for o in parsed if not o.is_sweep_override()], None)
        if not self.config.objective:
            fixed = [*fixed, "objective=normalized"]
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(direction="maximize", sampler=self.sampler)
        returns: list[Sequence[JobReturn]] = []
        for first in range(0, self.n_trials, self.n_jobs):
            trials = [study.ask(space) for _ in range(first, min(first + self.n_jobs, self.n_trials))]
            jobs = [[*fixed, *(f"{name}={value}" for name, value in t.params.items())] for t in trials]
            self._asked = first + len(jobs)
            self._train_first(jobs)
            self.validate_batch_is_legal(jobs)
            returns.append(self._launch(jobs, first))
            for trial, job in zip(trials, returns[-1], strict=True):
                well = job.status is JobStatus.COMPLETED
                study.tell(trial, job.return_value if well else None,
                           state=None if well else optuna.trial.TrialState.FAIL)  # fmt: skip
        self._tell(study, returns)
        return returns

    def _launch(self, jobs: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """What jobs return. Launchers that raise where one job's process died have nothing to say of the
        others, so each is asked for again by itself; what it made before is in the store."""
        try:
            return list(self.launcher.launch(jobs, initial_job_idx=first))
        except Exception as error:
            if len(jobs) > 1:
                log.warning(f"not all of {len(jobs)} trials have returned ({error}): one by one now")
                return [self._launch([job], first + n)[0] for n, job in enumerate(jobs)]
            log.warning(f"#{first} has not returned: {error}")
            failed = JobReturn(overrides=jobs[0], status=JobStatus.FAILED)
            failed.return_value = error
            return [failed]

    def _tell(self, study: Any, returns: list[Sequence[JobReturn]]) -> None:
        done = [trial for trial in study.trials if trial.value is not None]
        if not done:
            _ = returns[0][0].return_value  # raises what the first one failed with
        best = study.best_trial
        chosen = " ".join(f"{name}={value}" for name, value in best.params.items())
        log.info(f"best of {len(done)} trials: #{best.number}, {best.value:.4f}, {chosen}")
        results = {
            "name": "optuna",
            "best_params": best.params,
            "best_value": best.value,
            "best_job": best.number,
        }
        OmegaConf.save(OmegaConf.create(results), Path(self.config.hydra.sweep.dir) / RESULTS)


def _make_distribution(override: Override) -> Any:
    """What Optuna chooses from: numbers of an `interval` or `range`, else one of the values as written."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        low, high, log_scale = value.start, value.end, "log" in value.tags
        whole = isinstance(low, int) and isinstance(high, int)
        return IntDistribution(low, high, log_scale) if whole else FloatDistribution(low, high, log_scale)
    if isinstance(value, RangeSweep):
        numbers: list[Any] = sorted(override.sweep_iterator())
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        kind = IntDistribution if all(isinstance(n, int) for n in numbers) else FloatDistribution
        return kind(numbers[0], numbers[-1], step=step)
    return CategoricalDistribution(list(override.sweep_string_iterator()))
