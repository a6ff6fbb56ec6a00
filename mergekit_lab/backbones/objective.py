"""How a backbone learns a task and is scored on it: all that training, evaluation and analyses know of data.

A `Backbone` gives models and, for a task, an `Objective`. Samples are named by a part of the task and their
positions in it. Whoever chooses them (an order of training, a chunk of an evaluation) knows neither images nor
text. What becomes of them is the objective's own affair: reading, tokenizing, augmenting, decoding.

Legend: N samples of a batch, M items of a batch: what its loss is averaged over (images, answer tokens).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mergekit_lab.batches import Batch, to_device
from mergekit_lab.tasks import Part, Task


@dataclass(frozen=True)
class Assessment:
    """What a model makes of some samples.

    Attributes:
        loss: the sum over items, a scalar.
        items: how many.
        predictions: one a sample, of a kind that `Objective.measure` reads and `==` compares.
    """

    loss: Tensor
    items: int | Tensor
    predictions: list[Any] | Tensor


class Objective(nn.Module, ABC):
    """One task for one backbone. It moves to a device as modules do, has no parameters and no state dict.

    Attributes:
        fixes_shapes: whether augmented training batches have one shape, or one of a few from `fix_shape`.
        reading_threads: how many threads may make training batches at a time.
        replays_forward: whether evaluation calls the model with tensors of a few shapes and gets a small
            tensor.
        causal: whether the logits at a token predict the next one (a decoder-only language model).
        max_samples: the most samples that evaluation takes at a time, once memory ran out with more.
    """

    causal: ClassVar[bool] = False
    replays_forward: ClassVar[bool] = False
    reading_threads: ClassVar[int] = 1

    @property
    def fixes_shapes(self) -> bool:
        return False

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.max_samples: int | None = None

    @abstractmethod
    def batch(self, part: Part, index: Tensor) -> Batch:
        """These samples of a part, on the CPU, for `loss`; a function of its arguments alone."""

    def training_batch(self, index: Tensor) -> Batch:
        """These training samples, for `augment`."""
        return self.batch("train", index)

    def fix_shape(self, batch: Batch) -> Batch:
        """A training batch in one of a few shapes, so that steps of one shape can be recorded and replayed; on
        the CPU. Called where `fixes_shapes` holds and steps are recorded."""
        return batch

    def augment(self, batch: Batch, seed: int) -> Batch:
        """A training batch with what chance adds to it, on its device; a function of its arguments alone.

        Called once a step, ahead of it and in another thread: a method that evaluates twice sees the same
        batch twice.
        """
        return batch

    def expect(self, part: Part, chunks: Sequence[Tensor]) -> None:
        """`predict` or `assess` will be called for these samples, in this order; reading may begin."""

    def lengths(self, part: Part) -> Tensor | None:
        """What every sample of a part costs, `[size]`, if like ones are to share a batch; else None."""
        return None

    @abstractmethod
    def count_items(self, batch: Batch) -> int | Tensor:
        """M: what the batch's loss is averaged over, at least 1."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
        """The loss, summed over the batch's items."""

    def with_head(self, model: nn.Module) -> nn.Module:
        """A module that holds `model`, or is it, and maps a batch's inputs to the logits of its labels."""
        return model

    @abstractmethod
    def predict(self, model: nn.Module, part: Part, index: Tensor) -> list[Any] | Tensor:
        """What the model answers for these samples, one a sample; a tensor may still be in the making."""

    def assess(self, model: nn.Module, part: Part, index: Tensor) -> Assessment:
        """Loss and predictions together."""
        batch = to_device(self.batch(part, index), find_device(model))
        return Assessment(self.loss(model, batch), self.count_items(batch), self.predict(model, part, index))

    @abstractmethod
    def measure(self, predictions: Sequence[Any], part: Part, index: Tensor) -> dict[str, float]:
        """How good these predictions are, by name of the metric; `task.metric` among them."""

    def score_samples(self, predictions: Sequence[Any], part: Part, index: Tensor) -> Sequence[float] | None:
        """What every sample contributes to the task's metric, if that is their mean; else None."""
        return None


class Backbone(ABC):
    """A pretrained model to fine-tune. A subclass is a frozen dataclass of what names it.

    Attributes:
        note: what every report should say about its weights; empty for nothing.
    """

    note: str | None = None

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh copy of the pretrained model: its state dict is what is trained, stored and merged."""

    @abstractmethod
    def identity(self) -> dict[str, str]:
        """What identifies this backbone by content: architecture, source, SHA-256; no path."""

    @abstractmethod
    def check(self, task: Task) -> None:
        """Refuse, by an `InputError`, a task that this backbone cannot learn; without loading anything."""

    @abstractmethod
    def objective(self, task: Task) -> Objective:
        """How this backbone learns the task and is scored on it."""

    def learning(self, task: Task) -> dict[str, Any]:
        """What else decides what is learned, besides weights, the task's data and training settings."""
        return {}

    def scoring(self, task: Task) -> dict[str, Any]:
        """What else decides a score, besides the model, the task's data and the metric."""
        return {}

    def write_companions(self, folder: Path) -> list[str]:
        """Write what a library reads beside the weights, such as configuration and tokenizer; return the
        names."""
        return []


def to_list(predictions: list[Any] | Tensor) -> list[Any]:
    """Predictions one by one; waits for a device that still computes them."""
    return predictions.tolist() if isinstance(predictions, Tensor) else predictions


def find_device(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next(model.parameters()).device
