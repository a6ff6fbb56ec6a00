"""One run: check the configuration, then its stages in order."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from mergekit_lab.errors import InputError
from mergekit_lab.schema.check import check_against, stage_list
from mergekit_lab.store import content_key
from mergekit_lab.store.store import says_full

if TYPE_CHECKING:
    from mergekit_lab.runs.run import Run

log = logging.getLogger(__name__)
_ALONE = ("merge_checkpoints", "expand", "diagnose", "store")
_ON_DATA = ("fetch", "check_data")
_JOBS = {"report": "evaluate"}
"""The kind of work that a stage is, where it has not a kind of its own."""
_RESULTS = ("records.jsonl", "analysis", "diagnosis.json")
"""What runs leave in their folders for others to read."""
_CHOICES = ("experiment", "backbone", "suite", "finetuning", "optimizer", "training", "search", "merger")
_DECIDES_NOTHING = {
    "run_dir", "device", "trainer", "store", "logger", "progress", "only", "dry_run", "stage", "stages", "runs",
    "table", "metric", "data_root", "sources", "fetch_to", "images_limit_gb", "evaluation_batch_size",
}  # fmt: skip
"""What a run may change when it goes on where it was cut."""


def _stage(name: str) -> Callable[[Run], None]:
    """A stage that is imported when it runs: not every run needs Lightning."""

    def stage(run: Run) -> None:
        getattr(import_module(f"mergekit_lab.runs.{name}"), f"stage_{name}")(run)

    return stage


STAGES: dict[str, Callable[[Run], None]] = {
    name: _stage(name) for name in ("finetune", "curvature", "merge", "evaluate", "analyze", "report")
}


def execute(cfg: DictConfig, folder: Path, choices: Mapping[str, str], overrides: list[str]) -> float | None:
    """Run the stages that the configuration names.

    Args:
        cfg: the composed configuration.
        folder: where the report goes.
        choices: the option taken of each group.
        overrides: as on the command line; kept beside the error if the run fails.

    Returns:
        What the configuration asks for as `objective`; None where it asks for nothing, or plans.

    Raises:
        InputError: a user's mistake; `failure.json` in the run's folder says so too, unless results of an
            earlier run lie there, which a mistake leaves as they are. The file is there as long as
            the run works, so that one that is killed does not pass for the earlier one of its folder.
    """
    finished = _holds_results(folder) and not _in_sweep()
    (folder / "failure.json").unlink(missing_ok=True)
    try:
        asked = {cfg.get("stage"), *(cfg.get("stages") or ())}
        alone = next((name for name in _ALONE if name in asked), None)
        if alone:
            _run_alone(alone, cfg, folder, choices)
            return None
        wanted = stage_list(cfg, [*STAGES, *_ALONE, *_ON_DATA])
        if set(wanted) & set(_ON_DATA):
            _run_on_data(wanted, cfg, folder)
            return None
        if cfg.runs is not None:
            _compare(wanted, cfg, folder)
            return None
        refuse_missing(cfg)
        from mergekit_lab.runs.outcome import measure_outcome
        from mergekit_lab.runs.run import Run
        from mergekit_lab.schema.run import check, with_chosen_merger

        check(cfg)
        cfg = with_chosen_merger(cfg, overrides)
        run = Run(cfg, folder, choices)
        if cfg.dry_run:
            from mergekit_lab.runs.plan import Plan

            log.info("%s", Plan.of([run]).text())
            return None
        folder.mkdir(parents=True, exist_ok=True)
        _leave_word(folder, overrides, "it has not ended: it is under way, or was killed")
        begun = time.monotonic()
        try:
            for job, names in groupby(wanted, lambda name: _JOBS.get(name, name)):
                with _tracked(run, job):
                    for name in names:
                        with run.timed(name), _enough_memory(name):
                            STAGES[name](run)
            outcome = measure_outcome(run) if cfg.objective else None
        finally:
            run.close()
        (folder / "failure.json").unlink(missing_ok=True)
        log.info("done in %.0f s", time.monotonic() - begun)
        return outcome
    except Exception as error:
        if finished and isinstance(error, InputError):
            (folder / "failure.json").unlink(missing_ok=True)
            log.warning("%s keeps the results of an earlier run", folder)
            raise
        with suppress(OSError):  # the disk may be what failed
            folder.mkdir(parents=True, exist_ok=True)
            _leave_word(folder, overrides, f"{type(error).__name__}: {error}")
            (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
        if isinstance(error, InputError) or not says_full(error):
            raise
        raise InputError(
            f"no room for more in the run's folder {folder} ({error}): free some, or set run_dir=PATH; what "
            "was finished is in the store, and the same command finds it there"
        ) from error


def _leave_word(folder: Path, overrides: list[str], error: str) -> None:
    """What a comparison says of this run while it has no result."""
    told = json.dumps({"overrides": overrides, "error": error}, indent=1)
    (folder / "failure.json").write_text(told + "\n")


def refuse_missing(*configs: DictConfig) -> None:
    """Refuse a run, or jobs of a sweep, whose data, weights or experts cannot be had; `preflight` says how."""
    from mergekit_lab.runs import preflight

    preflight.refuse_missing(*(cfg for cfg in configs if _works_on_tasks(cfg)))


def _works_on_tasks(cfg: DictConfig) -> bool:
    """Whether a run needs what its configuration names: not the stages that fetch it or have their own."""
    asked = {cfg.get("stage"), *(cfg.get("stages") or ())}
    return not asked & {*_ALONE, *_ON_DATA} and cfg.get("runs") is None


def _holds_results(folder: Path) -> bool:
    """Whether an earlier run came to its end here."""
    made = any((folder / name).exists() for name in _RESULTS)
    return made and not (folder / "failure.json").exists()


def _in_sweep() -> bool:
    """Whether this is a job of a sweep: there what lies in the folder would pass for the job's own."""
    return HydraConfig.initialized() and not OmegaConf.is_missing(HydraConfig.get().job, "num")


@contextmanager
def _enough_memory(stage: str) -> Iterator[None]:
    """Say what to set where a device's memory was too small for what does not shrink by itself."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"the stage {stage} does not fit the device's memory ({str(error).splitlines()[0]}): lower "
            "evaluation_batch_size or curvature.chunk, or set device=cpu"
        ) from error


@contextmanager
def _tracked(run: Run, job: str) -> Iterator[None]:
    """Trackers see a run of their own for every kind of work, in one group an experiment."""
    deciding = {name: value for name, value in run.plain.items() if name not in _DECIDES_NOTHING}
    run.tracker.start(
        run.plain | {"choices": {group: run.choices.get(group) for group in _CHOICES}},
        run_dir=run.folder,
        name=f"{run.folder.name} {job}",
        group=run.choices.get("experiment") or run.plain["suite"]["name"],
        job_type=job,
        identity=content_key({"job": job, "configuration": deciding}),
    )
    try:
        yield
    finally:
        run.tracker.finish()


def _compare(wanted: list[str], cfg: DictConfig, folder: Path) -> None:
    """Runs that are there, from their folders alone."""
    from mergekit_lab.runs.compare import report_runs
    from mergekit_lab.schema.run import check

    check(cfg)
    if wanted != ["report"]:
        raise InputError("runs= compares runs that are there: say stage=report with it")
    report_runs(cfg, folder)


def _run_on_data(wanted: list[str], cfg: DictConfig, folder: Path) -> None:
    """The stages on data sets and weights alone: nothing is trained, and no store is needed."""
    from mergekit_lab.schema.run import check

    check(cfg)
    for name in wanted:
        if name not in _ON_DATA:
            raise InputError(f"the stage {name} does not run together with {' or '.join(_ON_DATA)}")
        if name == "fetch":
            from mergekit_lab.runs.fetch import run_fetch

            run_fetch(cfg)
        else:
            if cfg.dry_run:
                log.info("check_data would decode every image of %s", ", ".join(cfg.suite.tasks))
                continue
            from mergekit_lab.runs.check_data import run_check_data

            run_check_data(cfg, folder)


def _run_alone(name: str, cfg: DictConfig, folder: Path, choices: Mapping[str, str]) -> None:
    """The stages that run without the others: on checkpoints, configured by themselves, or on the store."""
    if stage_list(cfg, [*STAGES, *_ALONE, *_ON_DATA]) != [name]:
        raise InputError(f"the stage {name} runs alone")
    if name == "store":
        from mergekit_lab.runs.store import run_store

        run_store(cfg, folder, choices)
        return
    if "base" not in cfg:
        raise InputError(f"the stage {name} has a configuration of its own: run +experiment={name}")
    if name == "diagnose":
        from mergekit_lab.commands.diagnose import Diagnose, run_diagnose

        check_against(cfg, Diagnose)
        run_diagnose(cfg, folder)
    elif name == "expand":
        from mergekit_lab.commands.expand import Expand, run_expand

        check_against(cfg, Expand)
        run_expand(cfg)
    else:
        from mergekit_lab.commands.merge_checkpoints import MergeCheckpoints, run_merge_checkpoints

        check_against(cfg, MergeCheckpoints)
        run_merge_checkpoints(cfg)
