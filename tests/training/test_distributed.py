"""Two processes with gloo: equal weights after every step, and those of one process with the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from optim import distributed
from optim.problems import (
    BASES,
    OPTIMIZERS,
    Problem,
    assert_close,
    assert_differ,
    assert_equal_bits,
    compute_gradients,
    train,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each process saw; started once, because starting takes most of the time."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(
        distributed.work, (folder,), distributed.WORLD, start_method="forkserver"
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(distributed.WORLD)]


def assert_ranks_agree(results: list[dict[str, Any]]) -> None:
    for one, other in zip(results[0]["after"], results[1]["after"], strict=True):
        assert_equal_bits(other, one)


def train_alone(make: Any, problem: Problem) -> dict[str, torch.Tensor]:
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"])
    for _ in range(distributed.STEPS):
        optimizer.step(problem.closure)
    return problem.copy_weights()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_data_parallel_ranks_agree_after_every_step_and_equal_one_process(ranks, name) -> None:
    results = [rank["parallel"][name] for rank in ranks]
    assert_ranks_agree(results)
    for one, other in zip(results[0]["seen"], results[1]["seen"], strict=True):
        assert_equal_bits(other, one)
    assert_close(results[0]["after"][-1], train(OPTIMIZERS[name], "adamw", distributed.STEPS), 1e-9)


@pytest.mark.parametrize("name", distributed.LOCAL_ASCENT)
def test_a_local_ascent_goes_up_each_rank_s_own_gradient_and_ranks_agree_after_it(ranks, name) -> None:
    results = [rank["local ascent"][name] for rank in ranks]
    assert_ranks_agree(results)
    assert_equal_bits(results[0]["seen"][0], results[1]["seen"][0])
    assert_differ(results[0]["seen"][1], results[1]["seen"][1])


def test_a_local_ascent_equals_one_written_out(ranks) -> None:
    parts = [Problem() for _ in ranks]
    descent: dict[str, torch.Tensor] = {}
    for rank, problem in enumerate(parts):
        distributed.share(problem, rank)
        start = problem.copy_weights()
        g = compute_gradients(problem, start)
        norm = sum((t**2).sum() for t in g.values()) ** 0.5
        away = {name: w + 0.3 * g[name] / norm for name, w in start.items()}
        assert_close(ranks[rank]["local ascent"]["sam"]["seen"][1], away, 1e-10)
        for name, t in compute_gradients(problem, away).items():
            descent[name] = descent.get(name, 0) + t / len(parts)
    plain = Problem()
    reference = BASES["adamw"](plain.model.parameters())
    for name, p in plain.model.named_parameters():
        p.grad = descent[name]
    reference.step()
    assert_close(ranks[0]["local ascent"]["sam"]["after"][0], plain.copy_weights(), 1e-9)


def test_a_local_ascent_without_the_model_is_refused(ranks) -> None:
    for rank in ranks:
        assert "optimizer.attach(model) with the DistributedDataParallel" in rank["not attached"]


@pytest.mark.parametrize("name", distributed.PER_RANK)
def test_an_offset_per_rank_differs_between_ranks_that_agree_after_every_step(ranks, name) -> None:
    results = [rank["per rank"][name] for rank in ranks]
    assert_ranks_agree(results)
    assert_differ(results[0]["seen"][0], results[1]["seen"][0])


@pytest.mark.parametrize("name", distributed.SHARDED)
def test_sharded_parameters_give_the_weights_of_whole_ones(ranks, name) -> None:
    results = [rank["sharded"][name] for rank in ranks]
    assert_ranks_agree(results)
    assert_close(results[0]["after"][-1], train_alone(OPTIMIZERS[name], distributed.make_flat_problem()), 1e-9)


def test_sharded_parameters_without_a_closure_too(ranks) -> None:
    wanted = train_alone(OPTIMIZERS["mergopt-laplace"], distributed.make_flat_problem())
    assert_close(ranks[1]["sharded without closure"], wanted, 1e-9)


@pytest.mark.parametrize("name", distributed.NEEDS_WHOLE)
def test_what_needs_whole_parameters_refuses_sharded_ones(ranks, name) -> None:
    for rank in ranks:
        assert "fully_shard" in rank["needs whole"][name]
        assert "DistributedDataParallel" in rank["needs whole"][name]
