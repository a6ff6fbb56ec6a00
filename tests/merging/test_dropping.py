"""What drops entries by chance or by rank: DARE, DELLA and Breadcrumbs, and the counters that draw."""

import pytest
import torch
from merging.conftest import F64, draw, measure_error, merge_one
from merging.world import assert_equal, make_world, run
from torch import Tensor

from mergekit_lab import InputError
from mergekit_lab.merging import DARE, DELLA, TIES, Breadcrumbs, IsoC, Method, TaskArithmetic, WeightAverage
from mergekit_lab.merging.breadcrumbs import keep_middle
from mergekit_lab.merging.della import assign_probabilities
from mergekit_lab.merging.dropping import (
    CACHED_OUTPUTS,
    Counters,
    draw_bits,
    draw_bits_in_cache,
    draw_uniform,
    to_uniform,
)


def test_dare_without_dropping_is_its_inner_method() -> None:
    for inner in (TaskArithmetic(coefficient=0.3), TIES(density=0.3), WeightAverage()):
        assert_equal(run(DARE(density=1.0, inner=inner), *make_world()), run(inner, *make_world()))


def test_dare_is_unbiased_and_drops_the_stated_share() -> None:
    base = {"w": torch.zeros(200_000)}
    experts = {"a": {"w": torch.ones(200_000)}}
    merged = run(DARE(density=0.1, inner=TaskArithmetic(coefficient=1.0)), base, experts, {})["w"]
    assert float((merged != 0).float().mean()) == pytest.approx(0.1, abs=3e-3)
    assert float(merged.mean()) == pytest.approx(1.0, abs=3e-2)


def test_dare_draws_by_expert_tensor_and_seed() -> None:
    base = {"w": torch.zeros(4096), "v": torch.zeros(4096)}
    experts = {name: {"w": torch.ones(4096), "v": torch.ones(4096)} for name in ("a", "b")}

    def mask(seed: int, expert: str, tensor: str) -> Tensor:
        method = DARE(density=0.5, seed=seed, inner=TaskArithmetic(coefficient=1.0))
        return run(method, base, {expert: experts[expert]}, {})[tensor] != 0

    masks = [mask(0, "a", "w"), mask(1, "a", "w"), mask(0, "b", "w"), mask(0, "a", "v")]
    for i, first in enumerate(masks):
        for second in masks[i + 1 :]:
            assert 0.4 < float((first == second).float().mean()) < 0.6
    assert torch.equal(mask(0, "a", "w"), masks[0])


def test_the_counter_hash_gives_the_published_splitmix64_sequence() -> None:
    """Reference output of SplitMix64 for seed 1234567 (Rosetta Code's worked values)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    draws = draw_uniform([Counters(1234567, 0, 8)], torch.device("cpu"))
    halves = [half for output in published for half in (output % 2**32, output >> 32)]
    assert [int(v * 2**32) for v in draws.tolist()] == halves
    for start, count in ((2, 3), (3, 5), (0, 1), (7, 1)):
        part = draw_uniform([Counters(1234567, start, count)], torch.device("cpu"))
        assert torch.equal(part, draws[start : start + count])


def test_an_accelerator_draws_the_bits_that_a_cpu_draws() -> None:
    draws = [Counters(-3, 5, 2 * CACHED_OUTPUTS + 9), Counters(7, 2**40, 11), Counters(2**63 - 1, 0, 1)]
    by_torch = draw_bits(draws, torch.device("cpu"))
    drawn = torch.cat([torch.from_numpy(bits.astype("int64")) for _, bits in draw_bits_in_cache(draws)])
    assert torch.equal(drawn, by_torch)
    assert torch.equal(to_uniform(by_torch), draw_uniform(draws, torch.device("cpu")))
    assert [part for part, _ in draw_bits_in_cache(draws)][-1] == slice(len(drawn) - 1, len(drawn))


@pytest.mark.parametrize(
    ("density", "gamma", "kept"),
    [
        (0.3, 0.2, {6.0, 7.0, 8.0}),
        (0.3, 0.0, {8.0, 9.0, 10.0}),
        (0.9, 0.2, set(map(float, range(1, 10)))),  # the density leaves room to drop one at the top
        (1.0, 0.5, set(map(float, range(1, 11)))),
        (0.3, 0.19, {7.0, 8.0, 9.0}),  # shares are rounded down
        (0.05, 0.0, set()),
    ],
)
def test_breadcrumbs_keeps_the_middle_of_the_magnitudes(density: float, gamma: float, kept: set[float]) -> None:
    signs = torch.tensor([1.0, -1.0]).repeat(5)
    deltas = torch.stack([signs * torch.arange(1.0, 11), torch.arange(10.0, 0, -1)])
    for delta, row in zip(deltas, keep_middle(deltas, density, gamma), strict=True):
        assert set(row[row != 0].abs().tolist()) == kept
        assert torch.equal(row[row != 0], delta[row != 0])


def test_breadcrumbs_and_della_at_density_one_are_their_inner_method() -> None:
    deltas = draw(3, 6, 7)
    for inner in (TaskArithmetic(coefficient=0.4), TIES(preset="mergekit", density=0.5), IsoC(coefficient=2.0)):
        wanted = merge_one(inner, deltas)
        assert torch.equal(merge_one(Breadcrumbs(density=1.0, inner=inner), deltas), wanted)
        assert torch.equal(merge_one(DELLA(density=1.0, inner=inner), deltas), wanted)


@pytest.mark.parametrize("method", [Breadcrumbs(inner=TIES()), DELLA(inner=TIES())], ids=repr)
def test_tensor_by_tensor_methods_refuse_an_inner_method_that_surveys_the_model(method: Method) -> None:
    with pytest.raises(InputError, match="TIES surveys the task"):
        merge_one(method, draw(2, 3, 4))


def test_della_keeps_by_rank_of_magnitude_within_a_row() -> None:
    delta = torch.tensor([[-3.0, 1.0, 2.0], [0.1, -0.2, 0.3]])
    wanted = torch.tensor([[0.7, 0.5, 0.6], [0.5, 0.6, 0.7]], dtype=F64)
    assert torch.allclose(assign_probabilities(delta, 0.6, 0.1), wanted)
    assert torch.allclose(assign_probabilities(delta[0], 0.6, 0.1), wanted[0])
    kernel = draw(4, 3, 2, 2)
    probabilities = assign_probabilities(kernel, 0.6, 0.1)
    assert torch.equal(probabilities, assign_probabilities(kernel.flatten(1), 0.6, 0.1).view_as(kernel))
    assert torch.allclose(probabilities.flatten(1).mean(dim=1), torch.full((4,), 0.6, dtype=F64))
    assert float(assign_probabilities(torch.tensor(2.0), 0.6, 0.1)) == 0.6


def test_della_without_a_window_is_dare() -> None:
    deltas = draw(3, 50, 40)
    for inner in (TaskArithmetic(coefficient=0.4), TIES(preset="mergekit", density=1.0)):
        merged = merge_one(DELLA(density=0.5, epsilon=0.0, seed=3, inner=inner), deltas)
        assert measure_error(merged, merge_one(DARE(density=0.5, seed=3, inner=inner), deltas)) < 1e-12


def test_della_is_unbiased_and_keeps_large_entries_more_often() -> None:
    entries = 200_000
    delta = torch.linspace(1, 2, entries)[None]
    merged = merge_one(DELLA(density=0.5, epsilon=0.4, inner=TaskArithmetic(coefficient=1.0)), delta)
    small, large = merged[: entries // 10], merged[-entries // 10 :]
    assert float((small != 0).float().mean()) == pytest.approx(0.14, abs=0.01)
    assert float((large != 0).float().mean()) == pytest.approx(0.86, abs=0.01)
    assert float(merged.mean()) == pytest.approx(1.5, abs=0.02)
    assert float(small.mean()) == pytest.approx(1.05, abs=0.06)


def test_della_with_l1_rescaling_restores_each_tensors_norm() -> None:
    delta = draw(1, 50, 40)
    merged = merge_one(DELLA(rescale="l1", inner=TaskArithmetic(coefficient=1.0)), delta)
    assert float(merged.abs().sum()) == pytest.approx(float(delta.abs().sum()), rel=1e-12)
    assert 0.6 < float((merged != 0).float().mean()) < 0.8
