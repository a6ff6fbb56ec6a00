"""Batches as a pure function of (seed, step), so that resuming needs no state.

A batch maps a task's name to its objective's batch. In joint training every batch holds a share of each task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from mergekit_lab.backbones import Objective
from mergekit_lab.batches import Batch, list_tensors, pin_memory, to_device
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.prefetch import prefetch

_CPU = torch.device("cpu")
_AHEAD = 4
_READY = 2
"""Batches beyond the one in use that lie on a GPU."""
_POOL = 50
"""Batches that are sorted by length together."""


class StepBatches:
    """An iterable of exactly `steps` training batches, augmented, starting at any of them.

    Every task is shuffled anew in every pass; the order depends only on (seed, task, pass). If an
    objective knows lengths, samples of similar length share a batch. With `world` processes, each takes
    its share of the same batch.

    Args:
        objectives: by task; batches come from their training parts.
        batch_size: samples per step over all tasks and processes. Tasks take equal shares, at least one
            sample each.
        steps: the number of batches, also returned by `len`, whatever `start` is.
        seed: decides the order.
        start: the first step to yield.
        rank, world: this process's index, and the number of processes.
        few_shapes: give batches one of a few shapes, by `Objective.fix_shape`.
        device: where batches go.
    """

    def __init__(
        self,
        objectives: Mapping[str, Objective],
        batch_size: int,
        steps: int,
        seed: int,
        start: int = 0,
        rank: int = 0,
        world: int = 1,
        few_shapes: bool = False,
        device: torch.device = _CPU,
    ) -> None:
        self.objectives = dict(objectives)
        self.share = max(1, batch_size // len(objectives))
        self.steps = steps
        self.seed = seed
        self.start = start
        self.rank = rank
        self.world = world
        self.few_shapes = few_shapes
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._threads = min(each.reading_threads for each in self.objectives.values())
        self._sizes = {name: objective.task.count("train") for name, objective in self.objectives.items()}
        self._order: dict[tuple[int, int], np.ndarray] = {}
        empty = [name for name, size in self._sizes.items() if not size]
        if empty:
            raise InputError(
                f"the training part of ({join_names(empty)}) holds no sample: there is nothing to learn"
            )
        if self.share < world:
            raise InputError(
                f"training.batch_size={batch_size} gives each task {self.share} samples per step, fewer than "
                f"the {world} processes: raise it to {world * len(self.objectives)}, or use fewer processes"
            )

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        """The next batches are made while one is trained on; their order does not depend on it."""
        chosen = ((step, self.choose(step)) for step in range(self.start, self.steps))
        read = prefetch(self._make, chosen, ahead=_AHEAD + self._threads, threads=self._threads)
        return self._bring_all(read) if self._on_gpu else (batch for _, batch in read)

    def _make(self, chosen: tuple[int, Mapping[str, Tensor]]) -> tuple[int, dict[str, Batch]]:
        """A step and its batch; for a GPU not yet augmented, where it reads without the processor's help."""
        step, index = chosen
        batch = {task: self.objectives[task].make_training_batch(at) for task, at in index.items()}
        if self.few_shapes:
            batch = {task: self.objectives[task].fix_shape(part) for task, part in batch.items()}
        if self._on_gpu:
            return step, {task: pin_memory(part) for task, part in batch.items()}
        return step, self._augment(step, batch)

    def _bring_all(self, read: Iterator[tuple[int, dict[str, Batch]]]) -> Iterator[dict[str, Batch]]:
        """Batches on the GPU; the stream in use waits for each."""
        stream = torch.cuda.Stream(self.device)

        def bring(item: tuple[int, dict[str, Batch]]) -> tuple[dict[str, Batch], torch.cuda.Event]:
            step, batch = item
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                moved = {task: to_device(part, self.device) for task, part in batch.items()}
                return self._augment(step, moved), stream.record_event()

        for batch, ready in prefetch(bring, read, ahead=_READY):
            current = torch.cuda.current_stream(self.device)
            current.wait_event(ready)
            for part in batch.values():
                for tensor in list_tensors(part):
                    tensor.record_stream(current)
            yield batch

    def _augment(self, step: int, batch: Mapping[str, Batch]) -> dict[str, Batch]:
        """The batch of a step with what chance adds to it: a function of (seed, step, task, process)."""
        seed = (self.seed * 1_000_003 + step) % (1 << 63)
        augmented = {}
        for number, (task, part) in enumerate(batch.items()):
            own = spread_seed(seed * len(self.objectives) + number, self.rank, self.world)
            augmented[task] = self.objectives[task].augment(part, own)
        return augmented

    def state_dict(self) -> dict[str, int]:
        """Empty. Lightning asks resumable loaders for a state, but the trainer's step is all that is needed."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Nothing to restore."""

    def choose(self, step: int) -> dict[str, Tensor]:
        """The samples of each task's training part that one step takes, int64."""
        first = step * self.share
        chosen = np.arange(first, first + self.share)[self.rank :: self.world]
        result = {}
        for position, (name, size) in enumerate(self._sizes.items()):
            turns = chosen // size  # NumPy, for torch would let go of Python's lock in each of these lines
            chosen_by_turn = [
                self._draw_order(position, name, turn)[chosen[turns == turn] - turn * size]
                for turn in range(turns[0], turns[-1] + 1)
            ]
            result[name] = torch.from_numpy(np.concatenate(chosen_by_turn))
        return result

    def _draw_order(self, task: int, name: str, turn: int) -> np.ndarray:
        """The order in which a task's training part is gone through for the `turn`th time."""
        if (task, turn) not in self._order:
            self._order = {k: v for k, v in self._order.items() if k[0] != task or k[1] == turn - 1}
            mixed = (self.seed * 1_000_003 + task) * 1_000_003 + turn
            generator = torch.Generator().manual_seed(mixed % (1 << 63))
            order = torch.randperm(self._sizes[name], generator=generator)
            lengths = self.objectives[name].measure_lengths("train")
            order = order if lengths is None else order_by_length(order, lengths, self.share, generator)
            self._order[task, turn] = order.numpy()
        return self._order[task, turn]


def spread_seed(seed: int, rank: int, world: int) -> int:
    """Derive a process's own seed, 63 bits."""
    return (seed * world + rank) % (1 << 63)


def order_by_length(order: Tensor, lengths: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """A random order in which neighbors have similar lengths.

    Every pool of 50 batches is sorted by length and cut into batches, and these are shuffled. Samples that fill
    no batch come last.

    Args:
        order: a random permutation, `[size]`.
        lengths: every sample's length, `[size]`.
    """
    whole = []
    for pool in order[: len(order) // batch_size * batch_size].split(_POOL * batch_size):
        whole += pool[lengths[pool].argsort(stable=True)].split(batch_size)
    mixed = [whole[i] for i in torch.randperm(len(whole), generator=generator).tolist()]
    return torch.cat([*mixed, order[len(order) // batch_size * batch_size :]])
