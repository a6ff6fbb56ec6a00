"""One run: check the configuration, then its stages in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from mergekit_lab.errors import InputError, say_error
from mergekit_lab.failure import remove_failure, write_failure
from mergekit_lab.machine import count_cores
from mergekit_lab.runs.settle import settle
from mergekit_lab.schema.stages import ON_DATA, check_stages
from mergekit_lab.store import make_key

if TYPE_CHECKING:
    from mergekit_lab.runs.run import Run

log = logging.getLogger(__name__)
_JOB_OF_STAGE = {"report": "evaluate"}
"""Stages that a tracker shows as part of another stage's run."""
_CHOICES = ("experiment", "backbone", "suite", "finetuning", "optimizer", "training", "search", "merger")
_NOT_IDENTIFYING = {
    "run_dir", "device", "trainer", "store", "logger", "progress", "only", "dry_run", "stage", "runs",
    "shipped", "table", "metric", "data_root", "sources", "fetch_to", "images_limit_gb",
    "evaluation_batch_size", "evaluation_compile",
}  # fmt: skip
"""Settings that may change when an interrupted run continues: its tracker run stays the same."""


def execute(cfg: DictConfig, folder: Path, choices: Mapping[str, str], overrides: list[str]) -> float | None:
    """Run the stages that the configuration names; `programs.start` describes the arguments.

    While the run works, `failure.json` is in its folder: if it is killed, results of an earlier run there are
    not taken for its own.

    Returns:
        The value of the configuration's `objective`; None if it has none, or in a dry run.

    Raises:
        InputError: a user's mistake.
    """
    wanted = check_stages(cfg)
    if "store" in wanted:
        from mergekit_lab.runs.store import run_store

        run_store(cfg, folder, choices, overrides)
        return None
    if any(each.lstrip("+").startswith("store.action=") for each in overrides):
        raise InputError("store.action says what to do with the store, not in a run: add stage=store")
    from mergekit_lab.runs.compare import check_slice, list_runs, report_runs

    check_slice(cfg)
    from mergekit_lab.schema.run import check

    cfg = settle(cfg)
    if set(wanted) & set(ON_DATA):
        check(cfg)
        for name in wanted:
            getattr(import_module(f"mergekit_lab.runs.{name}"), f"run_{name}")(cfg, folder)
        return None
    if cfg.runs is not None:
        if wanted != ["report"]:
            raise InputError("runs= compares finished runs: add stage=report")
        folders = list_runs(cfg)
        check(cfg)
        report_runs(cfg, folders, folder, overrides)
        return None
    from mergekit_lab.runs.search import check_patterns

    run = make_run(cfg, folder, choices, overrides)
    check_patterns(run)
    if cfg.dry_run:
        from mergekit_lab.runs.plan import describe_plan

        log.info("%s", describe_plan([run]))
        return None
    return _run_stages(run, wanted)


def _run_stages(run: Run, wanted: list[str]) -> float | None:
    """Run the stages, and measure the configuration's `objective`."""
    from mergekit_lab.compiled import end_compilers
    from mergekit_lab.runs.evaluate import load_harness_tasks, measure_outcome

    if len(run.devices) > 1 and "finetune" in wanted:
        from mergekit_lab.runs.train import IMPORTS
        from mergekit_lab.workers import import_ahead

        import_ahead(IMPORTS)
    if run.has_harness and "evaluate" in wanted:
        load_harness_tasks(run)
    write_failure(run.folder, list(run.arguments), "it has not ended: it is under way, or was killed")
    begun = time.monotonic()
    try:
        _draw_pictures(run)
        for job, names in groupby(wanted, lambda name: _JOB_OF_STAGE.get(name, name)):
            with _track(run, job):
                for name in names:
                    if name == "report":
                        end_compilers()
                    with run.time_stage(name), _explain_memory(name):
                        getattr(import_module(f"mergekit_lab.runs.{name}"), f"stage_{name}")(run)
        outcome = measure_outcome(run) if run.cfg.objective else None
    finally:
        run.close()
    remove_failure(run.folder)
    log.info("done in %.0f s", time.monotonic() - begun)
    return outcome


def _draw_pictures(run: Run) -> None:
    """Draw the pictures of all rendered tasks, in several threads: a fingerprint needs the pictures."""
    from mergekit_lab.prefetch import prefetch
    from mergekit_lab.tasks import ImageTask

    drawn = [task for task in run.tasks.values() if isinstance(task, ImageTask) and task.rendered]
    for _ in prefetch(ImageTask.fingerprint, drawn, ahead=len(drawn), threads=count_cores()):
        pass


def make_run(
    cfg: DictConfig,
    folder: Path,
    choices: Mapping[str, str],
    overrides: Sequence[str],
    shared: dict[str, Any] | None = None,
) -> Run:
    """Make a run of a composed configuration; `Run` describes the arguments.

    Raises:
        InputError: the configuration is wrong, or data, weights or experts are missing and cannot be fetched.
    """
    from mergekit_lab.runs.fetch import refuse_missing
    from mergekit_lab.runs.run import Run
    from mergekit_lab.schema.run import check, with_chosen_merger

    cfg = settle(cfg)
    refuse_missing(cfg)
    run = Run(with_chosen_merger(check(cfg), overrides), folder, choices, shared)
    run.arguments = overrides
    return run


@contextmanager
def _explain_memory(stage: str) -> Iterator[None]:
    """Explain an out-of-memory error of work that cannot shrink itself: say which settings to lower."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"the stage {stage} does not fit the device's memory ({say_error(error)}): lower "
            "evaluation_batch_size or curvature.chunk, or set device=cpu"
        ) from error


@contextmanager
def _track(run: Run, job: str) -> Iterator[None]:
    """Start a tracker run for one kind of work, and finish it. All of an experiment are in one group."""
    from mergekit_lab.reporting import Start

    deciding = {name: value for name, value in run.plain.items() if name not in _NOT_IDENTIFYING}
    mergers = run.mergers if job not in ("finetune", "curvature") else ()
    start = Start(
        run.plain | {"choices": {group: run.choices.get(group) for group in _CHOICES}},
        run.folder,
        name=f"{run.folder.name} {job}",
        group=run.choices.get("experiment") or run.plain["suite"]["name"],
        job_type=job,
        identity=make_key({"job": job, "configuration": deciding}),
        tags=[run.choices.get("backbone", ""), run.name_optimizer(), *mergers],
    )
    run.tracker.start(start)
    try:
        yield
    finally:
        run.tracker.finish()
