"""Check a `Run`'s settings against each other before it begins. All functions raise `InputError`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from mergekit_lab.backbones import LanguageModel
from mergekit_lab.errors import InputError, join_names, suggest
from mergekit_lab.schema.stages import list_stages

_LACK = "lm-evaluation-harness's tasks score models, and have no part to learn or choose from"


def check_tasks(run: Any) -> None:
    """Check that the backbone can learn the tasks, the stages can use them, and settings name none but them."""
    if not run.tasks:
        raise InputError("the suite has no tasks")
    _check_scoring(run)
    if run.has_harness and not isinstance(run.backbone, LanguageModel):
        raise InputError(
            "lm-evaluation-harness asks models that continue a text, and this backbone is a "
            f"{type(run.backbone).__name__}: set backbone=hf_causal, or hf_seq2seq for encoder-decoders"
        )
    for task in run.tasks.values():
        run.backbone.check(task)
    _check_names(run)
    _check_shares(run)


def _check_names(run: Any) -> None:
    """Check that settings for single tasks name tasks of the run.

    `training.epochs_of` may name other tasks too, because a suite's recipe lists all of its tasks and a run may
    use some. But a name that is similar to a task without epochs is taken for a typing error.
    """
    tasks, epochs_of = list(run.tasks), run.training.epochs_of or {}
    without = [task for task in tasks if task not in epochs_of]
    slips = [name for name in epochs_of if name not in tasks and get_close_matches(name, without)]
    if epochs_of and not any(name in tasks for name in epochs_of):
        slips = list(epochs_of)
    for name in [*(name for name in run.cfg.optimizer_of if name not in tasks), *slips]:
        raise InputError(f"{name!r} is not a task of this run{suggest(name, tasks)}")


def _check_shares(run: Any) -> None:
    """Check that processes that train together get equally many micro-batches: they wait for each other."""
    strategy, processes, accumulate = run.trainer.strategy, run.processes, run.training.accumulate
    if strategy == "auto":
        return
    share = max(1, run.training.batch_size // (len(run.learned) if run.cfg.joint else 1))
    if share < processes or (accumulate > 1 and share % (processes * accumulate)):
        raise InputError(
            f"trainer={strategy}: {processes} processes with training.accumulate={accumulate} cannot share "
            f"{share} samples per task evenly: make training.batch_size a multiple of "
            f"{processes * accumulate} per task (a batch of the joint model has all tasks)"
        )
    if accumulate > 1 and run.plain["backbone"].get("packing"):
        raise InputError(
            "with backbone.packing, processes get different numbers of rows, so "
            f"training.accumulate={accumulate} would make different numbers of micro-batches: set it to 1, "
            "or backbone.packing=false"
        )


def _check_scoring(run: Any) -> None:
    """Check that nothing is learned from tasks that only score, or in a run of `models`."""
    cfg = run.cfg
    if (cfg.models is not None or run.has_harness) and "analyze" in list_stages(cfg):
        raise InputError(
            "analyses read the data of tasks that experts learned: leave models= and suite=lm_eval out"
        )
    if cfg.models is not None:
        if cfg.experts or cfg.mergers or cfg.merger or cfg.joint:
            raise InputError(
                "models= are scored as they are: leave experts and mergers out, and set joint=false "
                "(+experiment=evaluate_checkpoints does)"
            )
    elif run.learned:
        return
    elif not isinstance(cfg.experts, Mapping):
        raise InputError(
            f"{_LACK}: name experts=[A,B]; models=[A,B] with +experiment=evaluate_checkpoints; or "
            "texts=[a.csv,b.csv], which are learned"
        )
    elif cfg.joint or cfg.objective:
        raise InputError(f"{_LACK}: set joint=false and objective=null, or add texts=[a.csv,b.csv]")


def check_units(run: Any) -> None:
    """Check that the tasks have what the mergers need, and that `only` names units of the run."""
    for label, merger in run.mergers.items():
        if merger.searched and not run.learned:
            raise InputError(
                f"{_LACK}, and {label}'s coefficient is open: search.coefficients=[] takes each method's "
                "default, merger.coefficient=… sets one, texts=[a.csv,b.csv] has parts to choose on"
            )
        if merger.method.side_inputs and not run.learned:
            raise InputError(
                f"{_LACK}, and {label} reads {join_names(merger.method.side_inputs)} of training parts: leave "
                "it out, or add texts=[a.csv,b.csv]"
            )
        if merger.method.by_task and run.has_harness:
            raise InputError(
                f"mergers.{label}: {type(merger.method).__name__} makes a model for every expert's task, and "
                "suite=lm_eval scores one model on all: leave it out"
            )
    units = [*dict.fromkeys([*run.experts, *run.tasks]), *run.mergers, "+joint"]
    for name in run.only or ():
        if name not in units:
            raise InputError(f"only names {name!r}{suggest(name, units)}")
