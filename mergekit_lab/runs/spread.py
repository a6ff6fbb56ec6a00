"""Spread a stage over devices, with a worker process for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from mergekit_lab.errors import InputError
from mergekit_lab.runs.nodes import Node
from mergekit_lab.workers import import_ahead

log = logging.getLogger(__name__)


def spread(run: Any, stage: Callable[[Any], None], nodes: Sequence[Node]) -> None:
    """Make the missing artifacts of a `Run` in its worker processes, which call `stage` for one unit each.

    If only one unit is missing, nothing is done here, and this process makes it.

    Raises:
        InputError: a unit failed by a user's mistake. Raised after the other units are done.
        RuntimeError: another failure of a unit.
    """
    missing = [node.unit for node in nodes if node.unit and run.is_mine(node.unit) and not run.find(node)]
    units = sorted(dict.fromkeys(missing), key=lambda unit: unit != "+joint")  # the longest first
    if len(units) < 2:
        return
    theirs = run.vary({"device": "cuda:0" if run.device.type == "cuda" else "cpu", "progress": False})
    import_ahead([stage.__module__])
    log.info("%s on %d devices, a process each", ", ".join(units), len(run.devices))
    jobs = [(theirs, stage, unit) for unit in units]
    title = stage.__name__.removeprefix("stage_").replace("_", " ")
    outcomes = sorted(run.track(run.pool.run(_work_in_process, jobs), title, len(jobs)))
    if failed := [(units[number], outcome) for number, outcome in outcomes if outcome.error is not None]:
        message = "; ".join(f"{unit}: {outcome.error}" for unit, outcome in failed)
        raise (InputError if all(outcome.mistake for _, outcome in failed) else RuntimeError)(message)
    for _, outcome in outcomes:
        run.new_keys |= outcome.value
        run.obtained |= outcome.value


def _work_in_process(run: Any, stage: Callable[[Any], None], unit: str) -> set[str]:
    """Run a stage for one unit, in a worker. Returns the keys of what it made."""
    logging.getLogger("mergekit_lab").setLevel(logging.INFO)
    run.new_keys.clear()
    with run.work_on([unit]):
        stage(run)
    return set(run.new_keys)
