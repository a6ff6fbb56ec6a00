"""What a run's settings must agree on before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from mergekit_lab.errors import InputError, join_names, suggest
from mergekit_lab.runs.mergers import Merger
from mergekit_lab.schema.stages import list_stages
from mergekit_lab.training import TrainingSettings


def check_task_names(tasks: Sequence[str], optimizer_of: Iterable[str], epochs_of: Mapping[str, float]) -> None:
    """Options of single tasks name tasks of the run.

    `training.epochs_of` may also name tasks that the run leaves out, as a suite's recipe does for a part of it.
    A name that is near a task without epochs of its own is a slip.

    Raises:
        InputError: one names no task.
    """
    without = [task for task in tasks if task not in epochs_of]
    slips = [name for name in epochs_of if name not in tasks and get_close_matches(name, without)]
    if epochs_of and not any(name in tasks for name in epochs_of):
        slips = list(epochs_of)
    for name in [*(name for name in optimizer_of if name not in tasks), *slips]:
        raise InputError(f"{name!r} is not a task of this run{suggest(name, tasks)}")


def check_shares(
    training: TrainingSettings, strategy: str, processes: int, tasks_in_a_batch: int, packing: bool
) -> None:
    """Processes that train together wait for each other at every micro-batch: they need equally many.

    Raises:
        InputError: a batch cannot be shared equally.
    """
    if strategy == "auto":
        return
    share = max(1, training.batch_size // tasks_in_a_batch)
    accumulate = training.accumulate
    if share < processes or (accumulate > 1 and share % (processes * accumulate)):
        raise InputError(
            f"trainer={strategy}: {processes} processes with training.accumulate={accumulate} cannot share "
            f"{share} samples per task evenly: make training.batch_size a multiple of "
            f"{processes * accumulate} per task (a batch of the joint model has all tasks)"
        )
    if accumulate > 1 and packing:
        raise InputError(
            "with backbone.packing, processes get different numbers of rows, so "
            f"training.accumulate={accumulate} would make different numbers of micro-batches: set it to 1, "
            "or backbone.packing=false"
        )


_LACK = "lm-evaluation-harness's tasks score models, and have no part to learn or choose from"


def check_scoring(cfg: Any, learned: Sequence[str]) -> None:
    """What only scores teaches nothing: lm-evaluation-harness's tasks, and a run of `models`.

    Args:
        learned: the tasks that have parts to learn and choose from.

    Raises:
        InputError: the run wants more of them.
    """
    scored_alone = cfg.models is not None or len(learned) < len(cfg.suite.tasks)
    if scored_alone and "analyze" in list_stages(cfg):
        raise InputError(
            "analyses read the data of tasks that experts learned: leave models= and suite=lm_eval out"
        )
    if cfg.models is not None:
        if cfg.experts or cfg.mergers or cfg.merger or cfg.joint:
            raise InputError(
                "models= are scored as they are: leave experts and mergers out, and set joint=false "
                "(+experiment=evaluate_checkpoints does)"
            )
    elif learned:
        return
    elif not isinstance(cfg.experts, Mapping):
        raise InputError(
            f"{_LACK}: name experts=[A,B]; models=[A,B] with +experiment=evaluate_checkpoints; or "
            "texts=[a.csv,b.csv], which are learned"
        )
    elif cfg.joint or cfg.objective:
        raise InputError(f"{_LACK}: set joint=false and objective=null, or add texts=[a.csv,b.csv]")


def check_mergers(mergers: Mapping[str, Merger], *, learns: bool, has_harness: bool) -> None:
    """Lm-evaluation-harness's tasks score one model on all, and nothing of a merge is chosen or read on them.

    Args:
        learns: the run has tasks that are learned.
        has_harness: it has lm-evaluation-harness's.

    Raises:
        InputError: a merger wants more.
    """
    for label, merger in mergers.items():
        if merger.searched and not learns:
            raise InputError(
                f"{_LACK}, and {label}'s coefficient is open: search.coefficients=[] takes each method's "
                "default, merger.coefficient=… sets one, texts=[a.csv,b.csv] has parts to choose on"
            )
        if merger.method.side_inputs and not learns:
            raise InputError(
                f"{_LACK}, and {label} reads {join_names(merger.method.side_inputs)} of training parts: leave "
                "it out, or add texts=[a.csv,b.csv]"
            )
        if merger.method.by_task and has_harness:
            raise InputError(
                f"mergers.{label}: {type(merger.method).__name__} makes a model for every expert's task, and "
                "suite=lm_eval scores one model on all: leave it out"
            )
