"""Training steps recorded in CUDA graphs and replayed: the host launches one graph per step.

Two steps with the same shapes and the same plan (`WrappedOptimizer.plan`) launch the same kernels on the same
memory. The first step of a kind runs without a graph. The second is recorded, and later ones are replayed. The
first also serves as the warm-up that recording needs: it allocates moments and copies of weights outside the
graph's memory. No step runs twice, and none is left out.

What changes between steps goes to the device before a replay: the batch is copied over the recorded one,
generators are seeded by (seed, step), and the optimizer prepares its factors. Learning rates are already on the
device (`keep_on_device`). The kernels are the same with and without a graph, so results are equal bit for bit
if each kernel is deterministic.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.batches import Batch, map_tensors
from mergekit_lab.cuda_graphs import GraphStream
from mergekit_lab.errors import say_error
from mergekit_lab.optim.wrapper import WrappedOptimizer

log = logging.getLogger(__name__)

Batches = dict[str, Batch]
"""A batch a task."""

_WARM_UP = 2
"""Steps of any kind that run as written before one is recorded."""
_MOST = 32
"""Kinds of steps that are recorded; each takes memory for its launches, all share that of activations."""


@dataclass(frozen=True)
class _StepRecording:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    loss: Tensor


class Replay:
    """Runs the steps of one training, from recordings if possible.

    Args:
        step: makes one whole update from one batch per task, on the device, and returns the loss without
            waiting.
        optimizer: the one that `step` calls, after `keep_on_device` and `allow_replay`.
        device: the CUDA device of everything.
    """

    def __init__(
        self, step: Callable[[Batches], Tensor], optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self._step = step
        self._optimizer = optimizer if isinstance(optimizer, WrappedOptimizer) else None
        self._graph_stream = GraphStream(device)
        self._recordings: dict[Hashable, _StepRecording] = {}
        self._seen: Counter[Hashable] = Counter()
        self._may_record = True

    def __call__(self, batch: Batches) -> Tensor:
        """One step; returns its loss, which the next step overwrites."""
        with self._graph_stream.stream():
            return self._make(batch)

    def _make(self, batch: Batches) -> Tensor:
        key = self._find_key(batch)
        recording = self._recordings.get(key)
        if recording is not None:
            torch._foreach_copy_(recording.inputs, [tensor for _, tensor in _name_tensors(batch)])
            if self._optimizer is not None:
                self._optimizer.prepare_step()
            recording.graph.replay()
            if self._optimizer is not None:
                self._optimizer.count_step()
            return recording.loss
        if key is not None and self._may_record and self._seen[key] and self._seen.total() >= _WARM_UP:
            recording = self._record(batch)
            if recording is not None:
                self._recordings[key] = recording
                self._may_record = len(self._recordings) < _MOST
                recording.graph.replay()
                return recording.loss
        self._seen[key] += 1
        return self._step(batch)

    def _find_key(self, batch: Batches) -> Hashable:
        """What steps have in common that launch the same kernels; None where the host takes part."""
        plan = () if self._optimizer is None else self._optimizer.plan()
        if plan is None:
            return None
        return plan, tuple((*name, t.shape, t.dtype) for name, t in _name_tensors(batch))

    def _record(self, batch: Batches) -> _StepRecording | None:
        """Record the coming step, without making it. Where that fails, say so, and record no more."""
        optimizer = self._optimizer
        fixed = {task: map_tensors(Tensor.clone, part) for task, part in batch.items()}
        counted, generators = {}, []
        if optimizer is not None:
            optimizer.prepare_step()
            assert optimizer.replay is not None
            generators.append(optimizer.replay.generator)
            counted = {name: getattr(optimizer, name) for name in optimizer.saved_attributes}
        try:
            graph, loss = self._graph_stream.record(lambda: self._step(fixed), generators)
        except Exception as error:
            self._may_record = False
            for name, value in counted.items():
                setattr(optimizer, name, value)
            log.warning(
                "training.capture: a step cannot be recorded in a CUDA graph and runs without one (%s)",
                say_error(error),
            )
            return None
        return _StepRecording(graph, [tensor for _, tensor in _name_tensors(fixed)], loss)


def _name_tensors(batch: Batches) -> Iterator[tuple[tuple[str, Any], Tensor]]:
    for task, part in batch.items():
        for name, tensor in part.items() if isinstance(part, Mapping) else enumerate(part):
            yield (task, name), tensor
