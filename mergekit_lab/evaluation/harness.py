"""How good a model in memory is at a task of lm-evaluation-harness, by the harness itself."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from io import StringIO
from typing import Any
from unittest.mock import patch

from torch import nn

from mergekit_lab.errors import InputError, join_names, say_error
from mergekit_lab.memory import fit_memory
from mergekit_lab.tasks import HarnessTask

log = logging.getLogger(__name__)

_PERCENT = ("bleu", "chrf")
"""What sacreBLEU gives in percent."""
_ROWS_ON_CPU = 4


@dataclass(frozen=True)
class HarnessScores:
    """The harness's scores of one model on one task.

    Attributes:
        metrics: by name in the harness's order, at most 1 and more is better; with the name of their filter
            where a task has several, as `exact_match,strict-match`.
        samples: what each sample contributed, of metrics that are means.
        count: samples that were scored.
    """

    metrics: Mapping[str, float]
    samples: Mapping[str, Sequence[float]]
    count: int


def load_harness_task(task: HarnessTask) -> None:
    """Load a task's data, from its cache or the hub.

    Raises:
        InputError: the data cannot be loaded, or the harness has no such task.
    """
    manager = task.find_manager()
    try:
        with _silence():
            manager.load([task.name])
    except Exception as error:  # of data sets, hubs and task files, whatever they raise
        raise InputError(
            f"lm-evaluation-harness cannot load {task.name!r} ({type(error).__name__}: "
            f"{say_error(error)}): its data comes from the hub or its cache, or from where "
            "the task's file says"
        ) from None


def score_with_harness(
    model: nn.Module, tokenizer: Any, task: HarnessTask, *, precision: str = "float32", progress: bool = False
) -> HarnessScores:
    """Evaluate a model of transformers in memory, as `lm_eval --model hf` evaluates its folder.

    Args:
        model: causal or encoder-decoder, in evaluation mode.
        tokenizer: of transformers; it is not changed.
        precision: "bfloat16" computes by autocast.
        progress: show the harness's own bars.

    Raises:
        InputError: no model of transformers, a task that measures nothing a record can hold, or a device
            without memory for one row.
    """
    if not hasattr(model, "tie_weights"):
        raise InputError(
            f"lm-evaluation-harness scores models of transformers, and this is a {type(model).__name__}: set "
            "finetuning=full"
        )
    size = task.batch_size
    if size == "auto" and next(model.parameters()).device.type == "cpu":
        size = _ROWS_ON_CPU

    def evaluate(size: int | str) -> Any:
        return run_harness(model, tokenizer, task, size, precision, progress)

    if isinstance(size, int):
        results, _ = fit_memory(
            evaluate, size, what=f"evaluating {task.name}", setting="suite.batch_size",
            way_out="take a smaller model, or set device=cpu",
        )  # fmt: skip
    else:
        results = evaluate(size)
    return read_results(task, results)


def run_harness(
    model: nn.Module, tokenizer: Any, task: HarnessTask, size: int | str, precision: str, progress: bool
) -> Any:
    """What the harness itself returns; `size` is its batch size, a number or "auto"."""
    with _silence(progress):
        from lm_eval import evaluator
        from lm_eval.models.huggingface import HFLM

        whole = HFLM(
            pretrained=model,
            tokenizer=deepcopy(tokenizer),
            batch_size=size,
            mixed_precision_dtype=precision if precision != "float32" else None,
        )
        # it asks git, which complains aloud where there is no repository
        with patch.object(evaluator, "get_git_commit_hash", return_value=None):
            return evaluator.simple_evaluate(
                whole,
                tasks=[task.name],
                num_fewshot=task.num_fewshot,
                limit=task.limit,
                apply_chat_template=task.apply_chat_template,
                fewshot_as_multiturn=task.apply_chat_template,
                bootstrap_iters=0,
                task_manager=task.find_manager(),
                confirm_run_unsafe_code=task.confirm_run_unsafe_code,
            )


def read_results(task: HarnessTask, results: Any) -> HarnessScores:
    """The scores in what the harness returned."""
    larger_is_better = results["higher_is_better"].get(task.name) or {}
    logged = results["samples"].get(task.name) or ()
    metrics: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    left_out = []
    for key, value in results["results"][task.name].items():
        name, comma, kept_by = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        value = value / 100 if name in _PERCENT else value
        label = name if kept_by == "none" else key
        if larger_is_better.get(name) is False or not -1 <= value <= 1:
            left_out.append(label)
            continue
        metrics[label] = float(value)
        each = [sample.get(name) for sample in logged if sample["filter"] == kept_by]
        if each and all(isinstance(one, int | float) for one in each):
            mean = sum(each) / len(each)
            if math.isclose(mean, value, rel_tol=1e-9, abs_tol=1e-12):
                samples[label] = list(map(float, each))
    if not metrics:
        raise InputError(
            f"{task.name}: lm-evaluation-harness measures {join_names(left_out)}, but tables take only "
            "metrics that are at most 1, where more is better"
        )
    counts = results["n-samples"]
    return HarnessScores(metrics, samples, sum(counts[name]["effective"] for name in counts))


@contextmanager
def _silence(progress: bool = False) -> Iterator[None]:
    """Without what the harness prints; with its bars, which go to the standard error, where they are wanted."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nullcontext() if progress else redirect_stderr(StringIO()):
            yield
