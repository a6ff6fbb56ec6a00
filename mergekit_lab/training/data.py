"""Batches as a pure function of (seed, step), so that resuming needs no state.

A batch is a mapping from task name to its images and labels. One task is the plain case; for joint training
every batch holds a share of each task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import lightning
import torch
from torch import Tensor

from mergekit_lab.tasks import Split

Batch = dict[str, tuple[Tensor, Tensor]]


class StepBatches:
    """An iterable of exactly `steps` training batches, starting at any of them.

    Every task is shuffled anew each time it has been gone through; its order depends on (seed, task, pass)
    alone. With `world` processes each takes its share of the same batch.

    Args:
        splits: the training parts by task.
        batch_size: images a step over all tasks and processes; tasks take equal shares, at least one each.
        steps: how many batches there are; what `len` says, wherever iteration starts.
        seed: of the order.
        start: the first step to yield.
        rank, world: this process and how many there are.
    """

    def __init__(
        self,
        splits: Mapping[str, Split],
        batch_size: int,
        steps: int,
        seed: int,
        start: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.splits = dict(splits)
        self.share = max(1, batch_size // len(splits))
        self.steps = steps
        self.seed = seed
        self.start = start
        self.rank = rank
        self.world = world
        self._order: dict[tuple[int, int], Tensor] = {}

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.start, self.steps):
            yield self.batch(step)

    def state_dict(self) -> dict[str, int]:
        """Empty: Lightning asks resumable loaders for a state, and the trainer's step is all there is."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Nothing to restore."""

    def batch(self, step: int) -> Batch:
        """The batch of one step, images uint8 `[n, 3, H, W]` and labels int64 `[n]` by task."""
        result = {}
        for position, (name, split) in enumerate(self.splits.items()):
            first = step * self.share
            places = torch.arange(first, first + self.share)[self.rank :: self.world]
            index = torch.stack([self._place(position, len(split), int(p)) for p in places])
            result[name] = (split.images[index], split.labels[index])
        return result

    def _place(self, task: int, size: int, place: int) -> Tensor:
        turn, offset = divmod(place, size)
        if (task, turn) not in self._order:
            self._order = {k: v for k, v in self._order.items() if k[0] != task or k[1] == turn - 1}
            mixed = (self.seed * 1_000_003 + task) * 1_000_003 + turn
            generator = torch.Generator().manual_seed(mixed % (1 << 63))
            self._order[task, turn] = torch.randperm(size, generator=generator)
        return self._order[task, turn][offset]


class InOrder:
    """All images of the parts once, task after task.

    Args:
        splits: parts by task.
        batch_size: images at a time.
    """

    def __init__(self, splits: Mapping[str, Split], batch_size: int) -> None:
        self.splits = dict(splits)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return sum(-(-len(split) // self.batch_size) for split in self.splits.values())

    def __iter__(self) -> Iterator[Batch]:
        for name, split in self.splits.items():
            for start in range(0, len(split), self.batch_size):
                part = slice(start, start + self.batch_size)
                yield {name: (split.images[part], split.labels[part])}


class TaskData(lightning.LightningDataModule):
    """Training batches by step, and the validation parts in order.

    Args:
        train, validation: parts by task name.
        batch_size, steps, seed: see `StepBatches`.
        validation_batch_size: images at a time in validation.
    """

    def __init__(
        self,
        train: Mapping[str, Split],
        validation: Mapping[str, Split],
        *,
        batch_size: int,
        steps: int,
        seed: int,
        validation_batch_size: int = 512,
    ) -> None:
        super().__init__()
        self.train = dict(train)
        self.validation = dict(validation)
        self.batch_size = batch_size
        self.steps = steps
        self.seed = seed
        self.validation_batch_size = validation_batch_size

    def train_dataloader(self) -> StepBatches:
        trainer = self.trainer
        start, rank, world = (
            (trainer.global_step, trainer.global_rank, trainer.world_size) if trainer else (0, 0, 1)
        )
        return StepBatches(self.train, self.batch_size, self.steps, self.seed, start, rank, world)

    def val_dataloader(self) -> InOrder:
        return InOrder(self.validation, self.validation_batch_size)
