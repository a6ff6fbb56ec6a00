"""Stage evaluate: every model of the run on the test part of every task.

Labels of test parts choose nothing: they are scored only here. What a sweeper chooses runs by is measured on
validation (`measure_outcome`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from statistics import fmean

from mergekit_lab.errors import InputError
from mergekit_lab.evaluation import load_harness_task
from mergekit_lab.runs.finetune import declare_joint
from mergekit_lab.runs.merge import make_merged_model
from mergekit_lab.runs.models import Model, declare_evaluation, make_expert_model
from mergekit_lab.runs.nodes import Node
from mergekit_lab.runs.run import Run
from mergekit_lab.tasks import HarnessTask

log = logging.getLogger(__name__)


def list_models(run: Run) -> Iterator[Model]:
    """Every model of the run, in the order of the table."""
    if run.models:
        for name, source in run.models.items():
            yield Model("checkpoint", tuple(run.tasks), name=name, backbone=run.open_backbone(source))
        return
    yield Model("zero_shot", tuple(run.tasks))
    yield from (make_expert_model(run, name) for name in run.experts)
    yield from (make_merged_model(run, label) for label in run.mergers)
    if run.cfg.joint:
        yield Model("joint", tuple(run.tasks), declare_joint(run))


def list_evaluation_nodes(run: Run) -> list[Node]:
    """What the stage makes, in order."""
    return [declare_evaluation(run, model, task, "test") for model in list_models(run) for task in model.tasks]


def load_harness_tasks(run: Run) -> None:
    """Load lm-evaluation-harness's tasks before hours of training, to find out early what is missing.

    Raises:
        InputError: a task cannot be loaded.
    """
    for name, task in run.tasks.items():
        if isinstance(task, HarnessTask) and run.is_mine(name):
            if all(run.find(node) for node in list_evaluation_nodes(run) if node.unit == name):
                continue
            load_harness_task(task)


def stage_evaluate(run: Run) -> None:
    """Evaluate what has no evaluation on the test part yet, on the run's devices."""
    for model in list_models(run):
        if model.node:
            run.need(model.node)
    run.make(stage_evaluate, list_evaluation_nodes(run), "evaluating")


def measure_outcome(run: Run) -> float:
    """The score on validation of the run's best merged model, by which a sweeper chooses between runs.

    Returns:
        The mean over tasks of the task's metric (`objective=value`), or of the metric divided by the expert's
        (`objective=normalized`).

    Raises:
        InputError: a model is not made, or an expert's value is 0 and cannot be divided by.
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
