"""A stage spread over devices, with one worker process each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mergekit_lab.errors import InputError
from mergekit_lab.runs.nodes import Node
from mergekit_lab.workers import import_ahead

log = logging.getLogger(__name__)


def spread(run: Any, stage: Callable[[Any], None], nodes: Sequence[Node]) -> None:
    """Make what a `Run` lacks in its worker processes, by a stage for each unit. A single one is left to this
    process.

    Raises:
        InputError: a user's mistake in one of them, after the others are done.
        RuntimeError: another failure.
    """
    missing = [node.unit for node in nodes if node.unit and run.is_mine(node.unit) and not run.find(node)]
    units = sorted(dict.fromkeys(missing), key=lambda unit: unit != "+joint")  # which takes longest
    if len(units) < 2:
        return
    theirs = run.vary({"device": "cuda:0" if run.device.type == "cuda" else "cpu", "progress": False})
    import_ahead([stage.__module__])
    log.info("%s on %d devices, a process each", ", ".join(units), len(run.devices))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not run.cfg.progress) as bar:
        name = stage.__name__.removeprefix("stage_").replace("_", " ")
        task = bar.add_task(name, total=len(units))
        jobs = [(theirs, stage, unit) for unit in units]
        outcomes = run.pool.map(_work_in_process, jobs, lambda number, outcome: bar.advance(task))
    failed = {unit: o for unit, o in zip(units, outcomes, strict=True) if o.error is not None}
    if failed:
        message = "; ".join(f"{unit}: {outcome.error}" for unit, outcome in failed.items())
        raise (InputError if all(o.mistake for o in failed.values()) else RuntimeError)(message)
    run.new_keys.update(*(outcome.value for outcome in outcomes))


def _work_in_process(run: Any, stage: Callable[[Any], None], unit: str) -> set[str]:
    """In a worker: a stage for one unit."""
    logging.getLogger("mergekit_lab").setLevel(logging.INFO)
    run.new_keys.clear()
    with run.work_on([unit]):
        stage(run)
    return set(run.new_keys)
