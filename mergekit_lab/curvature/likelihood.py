"""The function that is differentiated: a sample's log-likelihood, for classifiers and language models.

Legend: N samples, L tokens, C classes or tokens of the vocabulary.

`log p(y|x)` of an image or a sentence to classify is that of its label. Of a text it is the **sum** over its
answer tokens, those whose label is not −100, each given the true ones before it: the answer's log-likelihood,
so that long answers weigh more than short ones (a mean over tokens would be another quantity).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from mergekit_lab.batches import IGNORED, Batch, find_labels
from mergekit_lab.errors import InputError


def compute_logits(model: nn.Module, batch: Batch, causal: bool) -> tuple[Tensor, Tensor]:
    """The model's logits `[N, C]` or `[N, L, C]` and the labels `[N]` or `[N, L]` that they are scores of.

    Args:
        causal: the logits at a token are of the next one; then the model is not given the labels.

    Raises:
        InputError: shapes that do not go together.
    """
    labels = find_labels(batch)
    if isinstance(batch, Mapping):
        out = model(**{k: v for k, v in batch.items() if not (causal and k == "labels")})
    else:
        out = model(batch[0])
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    if logits.shape[:-1] != labels.shape:
        raise InputError(
            f"the model gives logits {list(logits.shape)} for labels {list(labels.shape)}: they must agree in "
            "all but the last dimension"
        )
    return logits, labels


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over samples and their answer tokens, a scalar in float32 or float64."""
    flat = logits.flatten(0, -2)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    return -functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def draw_labels(logits: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Labels drawn from the model where there are some; ignored tokens stay ignored.

    Only answers are drawn, one after another, so padding and batch size do not matter.
    """
    answers = labels != IGNORED
    chances = logits[answers].float().softmax(dim=-1).cpu()
    drawn = labels.clone()
    if len(chances):
        drawn[answers] = torch.multinomial(chances, 1, generator=generator)[:, 0].to(labels)
    return drawn


def with_labels(batch: Batch, labels: Tensor, causal: bool) -> Batch:
    """The batch with other labels, given as `scores` returned them."""
    if causal:
        labels = torch.cat([find_labels(batch)[:, :1], labels], dim=1)
    return {**batch, "labels": labels} if isinstance(batch, Mapping) else (batch[0], labels)
