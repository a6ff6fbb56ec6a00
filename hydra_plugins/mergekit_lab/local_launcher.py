"""`hydra/launcher=local`: a sweep's jobs over the devices of this machine, a process each."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import (
    JobReturn,
    JobRuntime,
    JobStatus,
    configure_log,
    filter_overrides,
    run_job,
    setup_globals,
)
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.version import setbase
from omegaconf import DictConfig, OmegaConf, open_dict

log = logging.getLogger(__name__)
_MODULES = ("mergekit_lab.runs.graph", "mergekit_lab.runs.report")
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

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context = hydra_context
        self.config = config

    def ready(self) -> None:
        """Begin to import what jobs need, while the sweep is planned."""
        from mergekit_lab.workers import import_ahead

        backbone = str(OmegaConf.select(self.config, "backbone._target_"))
        import_ahead([*_MODULES, *(["open_clip"] if backbone.endswith("OpenClip") else [])])

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from mergekit_lab.workers import Outcome, Pool

        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        if self._pool is None:
            self._pool = Pool(self._devices())
        devices = self._pool.devices
        log.info(f"{len(job_overrides)} jobs on {len(devices)} devices ({', '.join(devices)})")
        jobs = _Jobs(self.hydra_context, self.config, job_overrides, initial_job_idx)

        def done(number: int, outcome: Outcome) -> None:
            well = not _failed(outcome)
            told = f"done in {outcome.seconds:.1f} s" if well else f"failed: {outcome.error or 'see above'}"
            log.info(f"#{initial_job_idx + number} on {outcome.device} {told}")

        outcomes = self._pool.map(run_one, jobs, done)
        failed = [n for n, o in enumerate(outcomes, start=initial_job_idx) if _failed(o)]
        if failed:
            log.warning(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(f'#{n}' for n in failed)}")
        return [
            o.value if o.error is None else _failure(job_overrides[n], o.error) for n, o in enumerate(outcomes)
        ]

    def dismiss(self) -> None:
        """Let the workers end, which a sweep's launches share: no job follows."""
        if self._pool is not None:
            self._pool.dismiss()

    def close(self) -> None:
        """End the workers, and wait for that."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _devices(self) -> list[str]:
        from mergekit_lab.machine import list_devices, usable_cores

        if self.devices is not None:
            return list(self.devices)
        devices = list_devices()
        return devices if devices != ["cpu"] else ["cpu"] * max(1, usable_cores() // 2)


@dataclass(frozen=True)
class _Jobs(Sequence[tuple[Any, ...]]):
    """What `run_one` takes, job by job; a job is told of when its turn has come."""

    hydra_context: HydraContext
    config: DictConfig
    overrides: Sequence[Sequence[str]]
    first: int

    def __len__(self) -> int:
        return len(self.overrides)

    def __getitem__(self, place: Any) -> Any:
        overrides = list(self.overrides[place])
        log.info(f"#{self.first + place}: {' '.join(filter_overrides(overrides))}")
        return self.hydra_context, self.config, overrides, self.first + place


def _failed(outcome: Any) -> bool:
    return outcome.error is not None or outcome.value.status is not JobStatus.COMPLETED


def _failure(overrides: Sequence[str], error: str) -> JobReturn:
    found = JobReturn(overrides=overrides, status=JobStatus.FAILED)
    found.return_value = RuntimeError(error)
    return found


def run_one(hydra_context: HydraContext, master: DictConfig, overrides: list[str], number: int) -> JobReturn:
    """In a worker: one job as Hydra's own launcher runs it. It is composed here, for that takes a third of a
    second, and all workers would wait for the one process that composes for them."""
    from mergekit_lab.__main__ import main

    setup_globals()
    setbase(master.hydra.runtime.version_base)
    Plugins.instance()  # they register what configurations are made of
    JobRuntime.instance().set("name", master.hydra.job.name)
    takes_device = "device" in master and not any(o.startswith("device=") for o in overrides)
    device = ["device=auto"] if takes_device else []
    config = hydra_context.config_loader.load_sweep_config(master, [*overrides, *device])
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    HydraConfig.instance().set_config(config)
    found = run_job(
        hydra_context=hydra_context,
        task_function=main.__wrapped__,  # type: ignore[attr-defined]
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    if found.status is JobStatus.FAILED:
        log.error(f"#{number} failed: {found._return_value}")
        found._return_value = RuntimeError(str(found._return_value))  # some exceptions do not pickle
    found.hydra_cfg = found.cfg = None
    return found
