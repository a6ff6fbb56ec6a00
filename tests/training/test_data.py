"""The order of the data is a function of (seed, step)."""

import torch
from tiny import tiny_split

from mergekit_lab.training import StepBatches


def flat(batches, task: str = "a") -> torch.Tensor:
    return torch.cat([batch[task][0].flatten(1).float().mean(1) for batch in batches])


def test_every_pass_shows_every_image_once_in_a_new_order() -> None:
    split = tiny_split(12)
    seen = flat(StepBatches({"a": split}, batch_size=4, steps=6, seed=0))
    everything = split.images.flatten(1).float().mean(1).sort().values
    assert torch.equal(seen[:12].sort().values, everything)
    assert torch.equal(seen[12:].sort().values, everything)
    assert not torch.equal(seen[:12], seen[12:])


def test_starting_later_gives_the_same_batches() -> None:
    splits = {"a": tiny_split(10), "b": tiny_split(7, seed=1)}
    whole = list(StepBatches(splits, 6, steps=9, seed=3))
    later = list(StepBatches(splits, 6, steps=9, seed=3, start=5))
    assert torch.equal(flat(whole[5:], "b"), flat(later, "b"))
    assert len(StepBatches(splits, 6, steps=9, seed=3, start=5)) == 9


def test_the_seed_decides_the_order() -> None:
    split = {"a": tiny_split(12)}
    assert not torch.equal(flat(StepBatches(split, 4, 3, seed=0)), flat(StepBatches(split, 4, 3, seed=1)))


def test_processes_share_one_batch_without_overlap() -> None:
    split = {"a": tiny_split(16)}
    one = StepBatches(split, 8, 1, seed=0).batch(0)["a"][0]
    parts = [StepBatches(split, 8, 1, seed=0, rank=r, world=2).batch(0)["a"][0] for r in range(2)]
    assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), one)


def test_joint_batches_hold_equal_shares_of_each_task() -> None:
    batch = StepBatches({"a": tiny_split(9), "b": tiny_split(30)}, 10, 4, seed=0).batch(2)
    assert [len(labels) for _, labels in batch.values()] == [5, 5]
