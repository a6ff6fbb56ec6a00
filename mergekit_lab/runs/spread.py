"""A stage spread over devices, with one worker process each."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import OmegaConf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mergekit_lab.errors import InputError
from mergekit_lab.reporting import Tracker
from mergekit_lab.workers import Pool, import_ahead

log = logging.getLogger(__name__)
_ERASE = "\r\x1b[2K"
"""Begins a line anew in a terminal, where another process draws a bar."""

Job: TypeAlias = tuple[type, dict[str, Any], str, dict[str, str], Callable[[Any], None]]
"""The class `Run`, its configuration, folder and choices, and a stage."""


def spread(pool: Pool, job: Job, units: Sequence[str], progress: bool) -> set[str]:
    """Run a stage for each unit in a worker process.

    Returns:
        The keys of what was made.

    Raises:
        InputError: a user's mistake in one of them, after the others are done.
        RuntimeError: another failure.
    """
    stage = job[-1]
    import_ahead([stage.__module__])
    log.info("%s on %d devices, a process each", ", ".join(units), len(pool.devices))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not progress) as bar:
        name = stage.__name__.removeprefix("stage_").replace("_", " ")
        task = bar.add_task(name, total=len(units))
        jobs = [(*job, unit) for unit in units]
        outcomes = pool.map(_work_in_process, jobs, lambda number, outcome: bar.advance(task))
    failed = {unit: o for unit, o in zip(units, outcomes, strict=True) if o.error is not None}
    if failed:
        message = "; ".join(f"{unit}: {outcome.error}" for unit, outcome in failed.items())
        raise (InputError if all(o.mistake for o in failed.values()) else RuntimeError)(message)
    return set().union(*(outcome.value for outcome in outcomes))


_latest: list[Any] = []
"""In a worker: the configuration of its latest job, and the run with its objects."""


def _work_in_process(
    make_run: Callable[..., Any],
    plain: dict[str, Any],
    folder: str,
    choices: dict[str, str],
    stage: Callable[[Any], None],
    unit: str,
) -> set[str]:
    """In a worker: a stage for one unit, with the objects that an earlier job of the run left."""
    logging.basicConfig(format=f"{_ERASE if sys.stdout.isatty() else ''}%(message)s", stream=sys.stdout)
    logging.getLogger("mergekit_lab").setLevel(logging.INFO)
    if not _latest or _latest[0] != plain:
        _latest[:] = plain, make_run(OmegaConf.create(plain), Path(folder), choices)
        _latest[1].tracker = Tracker()
    run = _latest[1]
    run.made.clear()
    with run.work_on([unit]):
        stage(run)
    return set(run.made)
