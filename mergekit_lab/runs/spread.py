"""A stage spread over devices, with one worker process each."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mergekit_lab.errors import InputError
from mergekit_lab.reporting import Tracker
from mergekit_lab.runs.nodes import Node
from mergekit_lab.workers import Pool, import_ahead

if TYPE_CHECKING:
    from mergekit_lab.runs.run import Run

log = logging.getLogger(__name__)
_ERASE = "\r\x1b[2K"
"""Begins a line anew in a terminal, where another process draws a bar."""


def spread(run: Run, pool: Pool, stage: Callable[[Run], None], nodes: Sequence[Node]) -> set[str]:
    """Make missing nodes on all devices of the run, with one process each. A single unit is left to the caller.

    Returns:
        The keys of what was made.

    Raises:
        InputError: a user's mistake in one of them, after the others are done.
        RuntimeError: another failure.
    """
    missing = [node.unit for node in nodes if node.unit and run.is_mine(node.unit) and not run.find(node)]
    units = sorted(dict.fromkeys(missing), key=lambda unit: unit != "+joint")  # which takes longest
    if len(units) < 2:
        return set()
    import_ahead([stage.__module__])
    log.info("%s on %d devices, a process each", ", ".join(units), len(run.devices))
    device = "cuda:0" if run.device.type == "cuda" else "cpu"
    plain = run.plain | {"device": device, "progress": False}
    jobs = [(type(run), stage, plain, str(run.folder), dict(run.choices), unit) for unit in units]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not run.plain["progress"]) as bar:
        name = stage.__name__.removeprefix("stage_").replace("_", " ")
        task = bar.add_task(name, total=len(units))
        outcomes = pool.map(_work_in_process, jobs, lambda number, outcome: bar.advance(task))
    failed = {unit: o for unit, o in zip(units, outcomes, strict=True) if o.error is not None}
    if failed:
        message = "; ".join(f"{unit}: {outcome.error}" for unit, outcome in failed.items())
        raise (InputError if all(o.mistake for o in failed.values()) else RuntimeError)(message)
    return set().union(*(outcome.value for outcome in outcomes))


_latest: list[Any] = []
"""In a worker: the configuration of its latest job, and the run with its objects."""


def _work_in_process(
    make_run: type[Run],
    stage: Callable[[Run], None],
    plain: dict[str, Any],
    folder: str,
    choices: dict[str, str],
    unit: str,
) -> set[str]:
    """In a worker: a stage for one unit, with the objects that an earlier job of the run left."""
    logging.basicConfig(format=f"{_ERASE if sys.stdout.isatty() else ''}%(message)s", stream=sys.stdout)
    logging.getLogger("mergekit_lab").setLevel(logging.INFO)
    if not _latest or _latest[0] != plain:
        _latest[:] = plain, make_run(OmegaConf.create(plain), Path(folder), choices)
        _latest[1].tracker = Tracker()
    run: Run = _latest[1]
    run.made.clear()
    with run.work_on([unit]):
        stage(run)
    return set(run.made)
