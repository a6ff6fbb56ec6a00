"""How good a model is at a part of a task, by the task's objective."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mergekit_lab.backbones import Objective
from mergekit_lab.backbones.objective import to_list
from mergekit_lab.errors import InputError
from mergekit_lab.tasks import Part

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Of one model on one task.

    Attributes:
        metrics: by name, more is better; at most 1.
        value: the task's own metric among them.
        predictions: one a sample.
        loss: mean over items, in nats; not a number where it was not asked for.
    """

    metrics: Mapping[str, float]
    value: float
    predictions: list[Any]
    loss: float = math.nan


def _fewer(samples: int, task: str, error: torch.OutOfMemoryError) -> int:
    """Half as many samples."""
    told = str(error).splitlines()[0]
    if samples == 1:
        raise InputError(
            f"evaluating one sample of {task} does not fit the device's memory ({told}): take a smaller "
            "backbone, or set device=cpu"
        ) from None
    log.warning(
        "out of memory with %d samples of %s at a time: trying %d (evaluation_batch_size=%d says so from the "
        "start)", samples, task, samples // 2, samples // 2,
    )  # fmt: skip
    return samples // 2


@torch.inference_mode()
def score(
    model: nn.Module,
    objective: Objective,
    part: Part,
    *,
    index: Tensor | None = None,
    batch_size: int = 512,
    with_loss: bool = False,
) -> Scores:
    """Evaluate a model, in evaluation mode for the duration.

    Args:
        model: where its parameters are, the objective is.
        part: train, validation or test.
        index: which samples, int64; all by default.
        batch_size: samples at a time, fewer where the device has no memory for so many. Those of one length
            share a batch where the objective knows lengths.
        with_loss: compute the loss too.

    Raises:
        InputError: the device has no memory for a single sample.
    """
    places = torch.arange(objective.task.count(part)) if index is None else index
    lengths = objective.lengths(part)
    order = torch.arange(len(places)) if lengths is None else lengths[places].argsort(stable=True)
    predictions: list[Any] = [None] * len(places)
    loss: Any = 0.0
    items: Any = 0
    was_training = model.training
    model.eval()
    size = min(batch_size, objective.max_samples or batch_size)
    objective.expect(part, [places[chunk] for chunk in order.split(size)])
    answered: list[tuple[Tensor, list[Any] | Tensor]] = []
    done = 0
    while done < len(order):
        chunk = order[done : done + size]
        try:
            if with_loss:
                found = objective.assess(model, part, places[chunk])
                answers, loss, items = found.predictions, loss + found.loss.double(), items + found.items
            else:
                answers = objective.predict(model, part, places[chunk])
        except torch.OutOfMemoryError as error:
            size = objective.max_samples = _fewer(len(chunk), objective.task.name, error)
        else:
            answered.append((chunk, answers))
            done += len(chunk)
            continue
        torch.cuda.empty_cache()
        objective.expect(part, [places[chunk] for chunk in order[done:].split(size)])
    for chunk, answers in answered:
        for place, answer in zip(chunk.tolist(), to_list(answers), strict=True):
            predictions[place] = answer
    model.train(was_training)
    metrics = objective.measure(predictions, part, places)
    mean = float(loss / items) if with_loss else math.nan
    return Scores(metrics, metrics[objective.task.metric], predictions, mean)
