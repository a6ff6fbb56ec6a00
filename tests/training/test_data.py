"""The order of the data is a function of (seed, step)."""

import pytest
import torch
from tiny import TinyTask, make_tiny_objective

from mergekit_lab import InputError
from mergekit_lab.backbones import ImageObjective
from mergekit_lab.training import StepBatches

HEAD = torch.zeros(3, 8)


def make_objective(size: int, seed: int = 0):
    return make_tiny_objective(HEAD, size, seed=seed)


def flatten(batches, task: str = "a") -> torch.Tensor:
    return torch.cat([batch[task][0].flatten(1).float().mean(1) for batch in batches])


def test_every_pass_shows_every_image_once_in_a_new_order() -> None:
    objective = make_objective(12)
    split = objective.task.load_samples("train")
    seen = flatten(StepBatches({"a": objective}, batch_size=4, steps=6, seed=0))
    everything = split.images.flatten(1).float().mean(1).sort().values
    assert torch.equal(seen[:12].sort().values, everything)
    assert torch.equal(seen[12:].sort().values, everything)
    assert not torch.equal(seen[:12], seen[12:])


def test_starting_later_gives_the_same_batches() -> None:
    splits = {"a": make_objective(10), "b": make_objective(7, seed=1)}
    whole = list(StepBatches(splits, 6, steps=9, seed=3))
    later = list(StepBatches(splits, 6, steps=9, seed=3, start=5))
    assert torch.equal(flatten(whole[5:], "b"), flatten(later, "b"))
    assert len(StepBatches(splits, 6, steps=9, seed=3, start=5)) == 9


def test_the_seed_decides_the_order() -> None:
    split = {"a": make_objective(12)}
    assert not torch.equal(flatten(StepBatches(split, 4, 3, seed=0)), flatten(StepBatches(split, 4, 3, seed=1)))


def test_processes_share_one_batch_without_overlap() -> None:
    split = {"a": make_objective(16)}
    one = next(iter(StepBatches(split, 8, 1, seed=0)))["a"][0]
    parts = [next(iter(StepBatches(split, 8, 1, seed=0, rank=r, world=2)))["a"][0] for r in range(2)]
    assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), one)


def test_joint_batches_hold_equal_shares_of_each_task() -> None:
    batch = next(iter(StepBatches({"a": make_objective(9), "b": make_objective(30)}, 10, 4, seed=0, start=2)))
    assert [len(labels) for _, labels in batch.values()] == [5, 5]


class Sized(ImageObjective):
    """Images that are said to have these lengths."""

    known = torch.randint(1, 200, (403,), generator=torch.Generator().manual_seed(0))

    def measure_lengths(self, part):
        return self.known


def collect_indices(batches: StepBatches) -> list[torch.Tensor]:
    return [batches.choose(step)["a"] for step in range(batches.steps)]


def test_samples_of_about_one_length_share_a_batch_and_every_pass_still_shows_all() -> None:
    objective = Sized(TinyTask(size=403), HEAD)
    grouped = StepBatches({"a": objective}, batch_size=4, steps=202, seed=0)
    seen = collect_indices(grouped)
    spread = [int(Sized.known[i].max() - Sized.known[i].min()) for i in seen[:100]]
    assert sum(spread) / 100 < 5
    assert len(torch.cat(seen)[:403].unique()) == 403
    means = torch.tensor([float(Sized.known[i].float().mean()) for i in seen[:100]])
    assert not torch.equal(means, means.sort().values)
    assert not torch.equal(torch.cat(seen)[:403], torch.cat(seen)[403:806])


class Short(Sized):
    known = torch.arange(3)


def test_a_part_smaller_than_a_batch_is_gone_through_again_and_again() -> None:
    for objective_class in (Short, ImageObjective):
        seen = torch.cat(
            collect_indices(
                StepBatches({"a": objective_class(TinyTask(size=3), HEAD)}, batch_size=4, steps=3, seed=0)
            )
        )
        assert [passed.sort().values.tolist() for passed in seen.split(3)] == [[0, 1, 2]] * 4


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(InputError, match=r"batch_size=2.*task 1 samples.*the 2"):
        StepBatches({"a": make_objective(3), "b": make_objective(3)}, 2, 1, seed=0, world=2)

    class Empty(TinyTask):
        def count(self, part) -> int:
            return 0

    with pytest.raises(InputError, match=r"training part of \(a\)"):
        StepBatches({"a": ImageObjective(Empty(), HEAD)}, 4, 1, seed=0)


def test_grouped_batches_too_are_a_function_of_seed_and_step_and_shared_without_overlap() -> None:
    objective = {"a": Sized(TinyTask(size=403), HEAD)}
    whole = collect_indices(StepBatches(objective, 4, 130, seed=2))
    assert torch.equal(StepBatches(objective, 4, 130, seed=2, start=120).choose(125)["a"], whole[125])
    parts = [StepBatches(objective, 4, 130, seed=2, rank=r, world=2).choose(125)["a"] for r in range(2)]
    assert torch.equal(torch.stack(parts, dim=1).flatten(), whole[125])
