"""How good a model is at a part of a task, by the task's objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mergekit_lab.backbones import Objective
from mergekit_lab.backbones.objective import Assessment, to_list
from mergekit_lab.evaluation.replay import replay_forward
from mergekit_lab.memory import fit_memory
from mergekit_lab.tasks import Part


@dataclass(frozen=True)
class Scores:
    """The scores of one model on one task.

    Attributes:
        metrics: values by name, at most 1; larger is better.
        value: the task's own metric among them.
        predictions: one a sample.
        loss: mean over items, in nats; NaN without `with_loss`.
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
        model: on the same device as the objective.
        part: train, validation or test.
        index: which samples, int64; all by default.
        batch_size: samples at a time, fewer where the device has no memory for so many. Those of one length
            share a batch where the objective knows lengths.
        with_loss: compute the loss too.

    Raises:
        InputError: the device has no memory for a single sample.
    """
    index = torch.arange(objective.task.count(part)) if index is None else index
    lengths = objective.measure_lengths(part)
    order = torch.arange(len(index)) if lengths is None else lengths[index].argsort(stable=True)
    size = min(batch_size, objective.max_samples or batch_size)
    expected = 0
    left = order

    def assess(size: int) -> Assessment:
        nonlocal expected
        if size != expected:
            objective.expect(part, [index[chunk] for chunk in left.split(size)])
            expected = size
        chunk = index[left[:size]]
        if with_loss:
            return objective.assess(runs, part, chunk)
        return Assessment(torch.zeros(()), len(chunk), objective.predict(runs, part, chunk))

    was_training = model.training
    model.eval()
    runs = replay_forward(model) if objective.replays_forward else model
    assessed: list[Assessment] = []
    while len(left):
        done, fitting = fit_memory(
            assess,
            size,
            what=f"evaluating {objective.task.name}",
            setting="evaluation_batch_size",
            way_out="take a smaller backbone, or set device=cpu",
        )
        if fitting < size:
            size = objective.max_samples = fitting
        assessed.append(done)
        left = left[size:]
    model.train(was_training)
    predictions: list[Any] = [None] * len(index)
    answers = (answer for each in assessed for answer in to_list(each.predictions))
    for position, answer in zip(order.tolist(), answers, strict=True):
        predictions[position] = answer
    metrics = objective.measure(predictions, part, index)
    mean = math.nan
    if with_loss:
        mean = float(sum(each.loss.double() for each in assessed) / sum(each.items for each in assessed))
    return Scores(metrics, metrics[objective.task.metric], predictions, mean)
