"""Top-1 accuracy of an image encoder with a frozen head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


@torch.inference_mode()
def accuracy(
    encoder: nn.Module, head: Tensor, images: Tensor, labels: Tensor, *, batch_size: int = 512
) -> float:
    """The share of images whose largest logit is the label's, in [0, 1].

    Args:
        encoder: maps images `[N, 3, H, W]` to features `[N, D]`; evaluated where its parameters are.
        head: `[C, D]`; the logits are `features @ head.T`.
        images: uint8 or float, `[N, 3, H, W]`.
        labels: int64 `[N]` in `0 … C−1`.
        batch_size: images at a time.
    """
    device = next(encoder.parameters()).device
    metric = MulticlassAccuracy(num_classes=len(head), average="micro").to(device)
    head = head.to(device)
    was_training = encoder.training
    encoder.eval()
    for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        metric.update(encoder(x.to(device)) @ head.T, y.to(device))
    encoder.train(was_training)
    return float(metric.compute())
