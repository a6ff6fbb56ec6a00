"""Count, cut and move batches of samples. Training, evaluation and curvature share them.

Dimension 0 of a tensor is the sample.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mergekit_lab.errors import InputError, join_names

Batch = tuple[Any, Tensor] | Mapping[str, Any]
"""Inputs and labels: a pair `(x, y)`, or keyword arguments of the model with `labels` among them."""

IGNORED = -100
"""The label of a token that belongs to no answer."""


def find_labels(batch: Batch) -> Tensor:
    """The labels of a batch.

    Raises:
        InputError: it has none.
    """
    if not isinstance(batch, Mapping):
        return batch[1]
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise InputError(f"a batch needs labels, a tensor; it has {join_names(batch)}")
    return labels


def count_samples(batch: Batch) -> int:
    """The number of samples in a batch."""
    return len(find_labels(batch))


def take_samples(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start … stop−1` of a batch."""
    return map_tensors(lambda tensor: tensor[start:stop], batch)


def cut_batch(batch: Batch, size: int) -> Iterator[Batch]:
    """The batch in pieces of at most `size` samples."""
    for start in range(0, count_samples(batch), size):
        yield take_samples(batch, start, start + size)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def pin_memory(batch: Batch) -> Batch:
    """The batch in pinned memory, from which a GPU copies asynchronously."""
    return map_tensors(Tensor.pin_memory, batch)


def list_tensors(batch: Batch) -> list[Tensor]:
    """Its tensors."""
    plain = dict(batch) if isinstance(batch, Mapping) else batch
    return [value for value in tree_leaves(plain) if isinstance(value, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The batch with `function` applied to each of its tensors.

    Mappings of other classes, such as the outputs of tokenizers, become dicts, because torch's `tree_map` does
    not look into them.
    """
    plain = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map(lambda value: function(value) if isinstance(value, Tensor) else value, plain)
