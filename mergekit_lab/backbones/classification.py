"""Images by an encoder and a frozen head: cross-entropy of `features @ head.T`, top-1 accuracy.

Legend: N images, C classes, D embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mergekit_lab.backbones.objective import Assessed, Batch, Objective, samples
from mergekit_lab.tasks import ImageTask, Part


class Classifier(nn.Module):
    """An encoder with a frozen head: `forward(images)` gives logits `[N, C] = features @ head.T`.

    encoder: gives features `[N, D]`. head: `[C, D]`. The head is no parameter and stays out of `state_dict`:
    what is trained, saved and merged is the encoder alone.
    """

    head: Tensor

    def __init__(self, encoder: nn.Module, head: Tensor):
        super().__init__()
        self.encoder = encoder
        self.register_buffer("head", head.detach().clone(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.encoder(images)
        return features @ self.head.T


class ImageObjective(Objective):
    """An image task with its head.

    Args:
        task: its images go to the encoder as they are, uint8.
        head: frozen, `[C, D]`.
    """

    task: ImageTask
    head: Tensor

    def __init__(self, task: ImageTask, head: Tensor) -> None:
        super().__init__(task)
        self.register_buffer("head", head.detach().clone(), persistent=False)

    def batch(self, part: Part, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.task.split(part).take(index)

    def items(self, batch: Batch) -> int:
        return samples(batch)

    def loss(self, model: nn.Module, batch: Any, *, label_smoothing: float = 0.0) -> Tensor:
        images, labels = batch
        logits = model(images) @ self.head.T
        return functional.cross_entropy(logits, labels, label_smoothing=label_smoothing) * len(labels)

    def scored(self, model: nn.Module) -> nn.Module:
        return Classifier(model, self.head)

    def predict(self, model: nn.Module, part: Part, index: Tensor) -> list[int]:
        images, _ = self.batch(part, index)
        logits = model(images.to(self.head.device)) @ self.head.T
        found: list[int] = logits.argmax(dim=-1).tolist()
        return found

    def assess(self, model: nn.Module, part: Part, index: Tensor) -> Assessed:
        images, labels = (x.to(self.head.device) for x in self.batch(part, index))
        logits = (model(images) @ self.head.T).float()
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return Assessed(loss, len(labels), logits.argmax(dim=-1).tolist())

    def measure(self, predictions: Sequence[Any], part: Part, index: Tensor) -> dict[str, float]:
        right = self.each(predictions, part, index)
        return {"accuracy": sum(right) / len(right)}

    def each(self, predictions: Sequence[Any], part: Part, index: Tensor) -> Sequence[float]:
        right: list[float] = (torch.tensor(predictions) == self.task.split(part).labels[index]).tolist()
        return right
