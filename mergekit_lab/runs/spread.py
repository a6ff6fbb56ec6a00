"""A stage spread over devices, with one worker process each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mergekit_lab.errors import InputError
from mergekit_lab.workers import Pool, import_ahead

if TYPE_CHECKING:
    from mergekit_lab.runs.run import Run

log = logging.getLogger(__name__)


def spread(
    pool: Pool, run: Run, stage: Callable[[Run], None], units: Sequence[str], *, progress: bool
) -> set[str]:
    """Run a stage of a run for each unit in a worker process.

    Returns:
        The keys of what was made.

    Raises:
        InputError: a user's mistake in one of them, after the others are done.
        RuntimeError: another failure.
    """
    import_ahead([stage.__module__])
    log.info("%s on %d devices, a process each", ", ".join(units), len(pool.devices))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not progress) as bar:
        name = stage.__name__.removeprefix("stage_").replace("_", " ")
        task = bar.add_task(name, total=len(units))
        jobs = [(run, stage, unit) for unit in units]
        outcomes = pool.map(_work_in_process, jobs, lambda number, outcome: bar.advance(task))
    failed = {unit: o for unit, o in zip(units, outcomes, strict=True) if o.error is not None}
    if failed:
        message = "; ".join(f"{unit}: {outcome.error}" for unit, outcome in failed.items())
        raise (InputError if all(o.mistake for o in failed.values()) else RuntimeError)(message)
    return set().union(*(outcome.value for outcome in outcomes))


def _work_in_process(run: Run, stage: Callable[[Run], None], unit: str) -> set[str]:
    """In a worker: a stage for one unit."""
    logging.getLogger("mergekit_lab").setLevel(logging.INFO)
    run.made.clear()
    with run.work_on([unit]):
        stage(run)
    return set(run.made)
