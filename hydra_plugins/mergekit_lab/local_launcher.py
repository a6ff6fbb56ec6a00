"""`hydra/launcher=local`: a sweep's jobs over the devices of this machine, a process each; of any program."""

import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

log = logging.getLogger(__name__)
MODULES = ("mergekit_lab.runs.graph", "mergekit_lab.runs.report")
"""What workers would spend seconds on importing, each."""


@dataclass
class LocalLauncherConf:
    """`devices`: null takes every CUDA device, else one process for every two cores."""

    _target_: str = "hydra_plugins.mergekit_lab.local_launcher.LocalLauncher"
    devices: list[str] | None = None


ConfigStore.instance().store(
    group="hydra/launcher", name="local", node=LocalLauncherConf, provider="mergekit_lab"
)


class LocalLauncher(Launcher):
    """Gives each job the next free device; what fails is listed at the end and stops no other job.

    Args:
        devices: as torch names them; one may be named more than once.
    """

    def __init__(self, devices: list[str] | None = None) -> None:
        self.devices = devices
        self._pool: Any = None
        self._stays = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def ready(self) -> None:
        """Begin to import what jobs need, while the sweep is planned; workers stay until `close`."""
        from mergekit_lab.workers import import_ahead

        self._stays = True
        if _is_ours(self.config):
            backbone = str(OmegaConf.select(self.config, "backbone._target_"))
            import_ahead([*MODULES, *(["open_clip"] if backbone.endswith("OpenClip") else [])])

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from mergekit_lab.workers import Pool

        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        if self._pool is None:
            self._pool = Pool(self._list_devices())
        devices = self._pool.devices
        log.info(f"{len(job_overrides)} jobs on {', '.join(devices)}")
        shared = cloudpickle.dumps(
            (Singleton.get_state(), self.hydra_context, self.task_function, self.config)
        )  # scripts and notebooks have functions that no worker could import
        returns: dict[int, JobReturn] = {}
        try:
            for number, outcome in self._pool.run(run_one, _Jobs(shared, job_overrides, initial_job_idx)):
                job = returns[number] = _to_return(job_overrides[number], outcome)
                ended = f"done in {outcome.seconds:.1f} s"
                if job.status is not JobStatus.COMPLETED:
                    ended = f"failed: {outcome.error or 'see above'}"
                log.info(f"#{initial_job_idx + number} on {outcome.device} {ended}")
        finally:
            if not self._stays:  # no sweeper but ours says when the last job is done
                self.close()
        ordered = [returns[number] for number in range(len(job_overrides))]
        failed = [n for n, job in enumerate(ordered) if job.status is not JobStatus.COMPLETED]
        if failed:
            names = ", ".join(f"#{initial_job_idx + n}" for n in failed)
            log.warning(f"{len(failed)} of {len(ordered)} jobs failed: {names}")
        return ordered

    def dismiss(self) -> None:
        """Let the workers end, which a sweep's launches share: no job follows."""
        if self._pool is not None:
            self._pool.dismiss()

    def close(self) -> None:
        """End the workers, and wait for that."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _list_devices(self) -> list[str]:
        from mergekit_lab.machine import count_cores, list_devices

        if self.devices is not None:
            return list(self.devices)
        devices = list_devices()
        return devices if devices != ["cpu"] else ["cpu"] * max(1, count_cores() // 2)


@dataclass(frozen=True)
class _Jobs(Sequence[tuple[Any, ...]]):
    """What `run_one` takes, job by job; a job is announced when its turn has come."""

    shared: bytes
    overrides: Sequence[Sequence[str]]
    first: int

    def __len__(self) -> int:
        return len(self.overrides)

    def __getitem__(self, position: Any) -> Any:
        overrides = list(self.overrides[position])
        log.info(f"#{self.first + position}: {' '.join(filter_overrides(overrides))}")
        return self.shared, overrides, self.first + position


def _is_ours(config: DictConfig) -> bool:
    """Whether the program is mergekit_lab, and not another one in the same environment."""
    from mergekit_lab.paths import find_conf_dir

    sources = config.hydra.runtime.config_sources
    return any(source.schema == "file" and Path(source.path) == find_conf_dir() for source in sources)


def _to_return(overrides: Sequence[str], outcome: Any) -> JobReturn:
    if outcome.error is None:
        job: JobReturn = pickle.loads(outcome.value)
        return job
    job = JobReturn(overrides=overrides, status=JobStatus.FAILED)
    job.return_value = RuntimeError(outcome.error)
    return job


def run_one(shared: bytes, overrides: list[str], number: int) -> bytes:
    """In a worker: one job as Hydra's own launcher runs it, and what it returns.

    It is composed here, for that takes a third of a second, and all workers would wait for the one process that
    composes for them. A worker sees its own device alone.
    """
    setup_globals()
    state, hydra_context, task_function, master = pickle.loads(shared)
    Singleton.set_state(state)
    takes_device = _is_ours(master) and "device" in master
    own_device = takes_device and not any(o.startswith("device=") for o in overrides)
    config = hydra_context.config_loader.load_sweep_config(
        master, [*overrides, *(["device=auto"] if own_device else [])]
    )
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    HydraConfig.instance().set_config(config)
    job = run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    if job.status is JobStatus.FAILED:
        log.error(f"#{number} failed: {job._return_value}")
    try:
        packed = cloudpickle.dumps(job)
        pickle.loads(packed)
    except Exception:  # as some errors do
        job._return_value = RuntimeError(f"{type(job._return_value).__name__}: {job._return_value}")
        packed = cloudpickle.dumps(job)
    return packed
