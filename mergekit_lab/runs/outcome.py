"""One number of a run, for a sweeper that searches over whole runs."""

from __future__ import annotations

import logging
from statistics import fmean

from mergekit_lab.errors import InputError
from mergekit_lab.runs.context import Context
from mergekit_lab.runs.evaluate import Subject, evaluate, subjects

log = logging.getLogger(__name__)


def outcome(run: Context) -> float:
    """How good the run's best merged model is on validation, as the run's `objective` says.

    Like every choice, that between runs is not made on test parts.

    Returns:
        The mean over tasks of the task's metric ("value"), or of its share of the expert's ("normalized").

    Raises:
        InputError: a model is not made, or an expert that is to be divided by has the value 0.
    """

    def value(subject: Subject, task: str) -> float:
        return float(evaluate(run, subject, task, "validation").info["value"])

    whole = dict.fromkeys(run.tasks, 1.0)
    if run.cfg.objective == "normalized":
        whole = {task: value(Subject.expert(run, task), task) for task in run.tasks}
        if 0 in whole.values():
            raise InputError(
                "objective=normalized divides by the experts' values, and one is 0: set it to value"
            )
    found = {
        subject.merger.label: fmean(value(subject, task) / whole[task] for task in run.tasks)
        for subject in subjects(run)
        if subject.merger
    }
    best = max(found, key=lambda label: found[label])
    log.info("objective: %.4f (%s on validation, by %s)", found[best], run.cfg.objective, best)
    return found[best]
