"""How good a model is at a part of a task, by the task's objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mergekit_lab.backbones import Objective
from mergekit_lab.backbones.objective import listed
from mergekit_lab.tasks import Part


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
        batch_size: samples at a time. Those of one length share a batch where the objective knows lengths.
        with_loss: compute the loss too.
    """
    places = torch.arange(objective.task.count(part)) if index is None else index
    lengths = objective.lengths(part)
    order = torch.arange(len(places)) if lengths is None else lengths[places].argsort(stable=True)
    predictions: list[Any] = [None] * len(places)
    loss: Any = 0.0
    items: Any = 0
    was_training = model.training
    model.eval()
    chunks = order.split(batch_size)
    objective.expect(part, [places[chunk] for chunk in chunks])
    answered: list[list[Any] | Tensor] = []
    for chunk in chunks:
        if with_loss:
            found = objective.assess(model, part, places[chunk])
            answers, loss, items = found.predictions, loss + found.loss.double(), items + found.items
        else:
            answers = objective.predict(model, part, places[chunk])
        answered.append(answers)
    for chunk, answers in zip(chunks, answered, strict=True):
        for place, answer in zip(chunk.tolist(), listed(answers), strict=True):
            predictions[place] = answer
    model.train(was_training)
    metrics = objective.measure(predictions, part, places)
    mean = float(loss / items) if with_loss else math.nan
    return Scores(metrics, metrics[objective.task.metric], predictions, mean)
