"""One number of a run, for a sweeper that searches over whole runs."""

from __future__ import annotations

import logging
from statistics import fmean

from mergekit_lab.errors import InputError
from mergekit_lab.runs.merge import make_merged_model
from mergekit_lab.runs.models import Model, declare_evaluation, make_expert_model
from mergekit_lab.runs.run import Run

log = logging.getLogger(__name__)


def measure_outcome(run: Run) -> float:
    """How good the run's best merged model is on validation, as the run's `objective` says.

    Like every choice, that between runs is not made on test parts.

    Returns:
        The mean over tasks of the task's metric ("value"), or of its share of the expert's ("normalized").

    Raises:
        InputError: a model is not made, or an expert that is to be divided by has the value 0.
    """

    def measure_value(model: Model, task: str) -> float:
        return float(run.obtain(declare_evaluation(run, model, task, "validation")).info["value"])

    whole = dict.fromkeys(run.experts, 1.0)
    if run.cfg.objective == "normalized":
        whole = {task: measure_value(make_expert_model(run, task), task) for task in run.experts}
        if 0 in whole.values():
            raise InputError(
                "objective=normalized divides by the experts' values, and one is 0: set it to value"
            )
    means = {
        label: fmean(measure_value(make_merged_model(run, label), task) / whole[task] for task in run.experts)
        for label in run.mergers
    }
    best = max(means, key=lambda label: means[label])
    log.info("objective: %.4f (%s on validation, by %s)", means[best], run.cfg.objective, best)
    return means[best]
