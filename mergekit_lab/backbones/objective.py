"""How a backbone learns a task and is scored: all that training, evaluation and analyses know of data.

A `Backbone` makes models and, for a task, an `Objective`. Samples are named by a part of the task and their
index in it. Callers choose samples without knowing whether they are images or text. Reading, tokenizing,
augmenting and decoding belong to the objective.

Legend: N samples of a batch, M items of a batch, over which its loss is averaged (images, answer tokens).
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
    """A model's results on some samples.

    Attributes:
        loss: summed over items, a scalar.
        items: number of items.
        predictions: one per sample, of a type that `Objective.measure` reads and `==` compares.
    """

    loss: Tensor
    items: int | Tensor
    predictions: list[Any] | Tensor


class Objective(nn.Module, ABC):
    """One task for one backbone. It moves to a device as modules do, and has no parameters and no state dict.

    Attributes:
        fixes_shapes: whether augmented training batches have one shape, or one of a few from `fix_shape`.
        reading_threads: the most threads that may make training batches at a time.
        replays_forward: whether evaluation calls the model with few shapes and gets a small tensor, so that a
            GPU can replay it.
        causal: whether the logits at a token predict the next one (a decoder-only language model).
        max_samples: the most samples per evaluation batch, set after memory ran out with more.
    """

    fixes_shapes: bool = False
    causal: ClassVar[bool] = False
    replays_forward: ClassVar[bool] = False
    reading_threads: ClassVar[int] = 1

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.max_samples: int | None = None

    @abstractmethod
    def make_batch(self, part: Part, index: Tensor) -> Batch:
        """Samples of a part on the CPU, for `compute_loss`. It must depend only on its arguments."""

    def make_training_batch(self, index: Tensor) -> Batch:
        """Training samples for `augment`."""
        return self.make_batch("train", index)

    def fix_shape(self, batch: Batch) -> Batch:
        """Pad a training batch on the CPU to one of a few shapes, so that steps of one shape can be recorded
        and replayed. Called only if `fixes_shapes` is true and steps are recorded.
        """
        return batch

    def augment(self, batch: Batch, seed: int) -> Batch:
        """Augment a training batch on its device. It must depend only on its arguments.

        Called once per step, ahead of it, in another thread. An optimizer that evaluates twice sees the same
        batch twice.
        """
        return batch

    def expect(self, part: Part, chunks: Sequence[Tensor]) -> None:
        """Announce that `predict` or `assess` will be called for these samples, in this order. Reading may
        begin.
        """

    def measure_lengths(self, part: Part) -> Tensor | None:
        """The cost of every sample of a part, `[size]`, if similar ones should share a batch; else None."""
        return None

    @abstractmethod
    def count_items(self, batch: Batch) -> int | Tensor:
        """M: the number of items that the batch's loss is averaged over, at least 1."""

    @abstractmethod
    def compute_loss(self, model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
        """The loss, summed over the batch's items."""

    def with_head(self, model: nn.Module) -> nn.Module:
        """A module that maps a batch's inputs to logits of its labels: `model`, or one that contains it."""
        return model

    @abstractmethod
    def predict(self, model: nn.Module, part: Part, index: Tensor) -> list[Any] | Tensor:
        """The model's answers, one per sample. A tensor may still be being computed on its device."""

    def assess(self, model: nn.Module, part: Part, index: Tensor) -> Assessment:
        """Loss and predictions together."""
        batch = to_device(self.make_batch(part, index), find_device(model))
        return Assessment(
            self.compute_loss(model, batch), self.count_items(batch), self.predict(model, part, index)
        )

    @abstractmethod
    def measure(self, predictions: Sequence[Any], part: Part, index: Tensor) -> dict[str, float]:
        """Values of metrics for these predictions, by name. `task.metric` is one of them."""

    def score_samples(self, predictions: Sequence[Any], part: Part, index: Tensor) -> Sequence[float] | None:
        """Every sample's contribution to the task's metric, if the metric is their mean; else None."""
        return None


class Backbone(ABC):
    """A pretrained model to fine-tune. A subclass is a frozen dataclass, whose fields identify it.

    Attributes:
        note: a remark on the weights for every report, or "".
    """

    note: str | None = None

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A fresh copy of the pretrained model: its state dict is what is trained, stored and merged."""

    @abstractmethod
    def identify(self) -> dict[str, str]:
        """What identifies this backbone by content: architecture, source, SHA-256. It contains no path."""

    @abstractmethod
    def check(self, task: Task) -> None:
        """Raise `InputError` for a task that this backbone cannot learn, without loading anything."""

    @abstractmethod
    def make_objective(self, task: Task) -> Objective:
        """How this backbone learns a task and is scored on it."""

    def describe_learning(self, task: Task) -> dict[str, Any]:
        """Settings that decide what is learned, besides weights, the task's data and training settings."""
        return {}

    def describe_scoring(self, task: Task) -> dict[str, Any]:
        """Settings that decide a score, besides the model, the task's data and the metric."""
        return {}

    def write_companions(self, folder: Path) -> list[str]:
        """Write the files that a library reads besides weights, such as configuration and tokenizer. Return
        their names.
        """
        return []


def to_list(predictions: list[Any] | Tensor) -> list[Any]:
    """Predictions as a list. Waits for a device that is still computing them."""
    return predictions.tolist() if isinstance(predictions, Tensor) else predictions


def find_device(model: nn.Module) -> torch.device:
    """The device of a model's parameters."""
    return next(model.parameters()).device
