"""The limit cases that methods state, and their arithmetic against computations written out here."""

import math
from dataclasses import replace

import pytest
import torch
from merging.conftest import F64, draw, measure_error, merge_one
from merging.world import assert_close, assert_equal, make_world, run

from mergekit_lab import InputError
from mergekit_lab.merging import (
    PCB,
    RAM,
    SLERP,
    TIES,
    WUDI,
    Breadcrumbs,
    ConsensusTA,
    Fisher,
    IsoC,
    IsoCTS,
    Karcher,
    LiNeS,
    Method,
    ModelStock,
    MultiSLERP,
    RegMean,
    TaskArithmetic,
    WeightAverage,
    merge_state_dicts,
)

ONE = TaskArithmetic(coefficient=1.0)


def test_task_arithmetic_takes_a_list_of_coefficients_and_forgets_with_a_negative_one() -> None:
    base, experts, fishers = make_world()
    merged = run(TaskArithmetic(coefficient=[0.5, -1.0, 0.0]), base, experts, fishers)
    a, b, _ = experts.values()
    wanted = {n: v + 0.5 * (a[n] - v) - (b[n] - v) if v.is_floating_point() else v for n, v in base.items()}
    assert_close(merged, wanted)
    same = run(
        TaskArithmetic(coefficient=1.0, weights={"task_0": 0.5, "task_1": -1.0, "task_2": 0.0}), *make_world()
    )
    assert_equal(merged, same)


def test_pcb_of_one_expert_clamps_magnitudes_to_a_quantile_that_is_exact_in_float64() -> None:
    delta = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=F64)
    merged = merge_one(PCB(density=1.0, coefficient=1.0), delta[None])
    assert merged.abs().max() == delta.abs().sort().values[-2]


def test_pcb_at_density_one_gives_the_entry_of_least_balance_no_weight() -> None:
    delta = torch.linspace(0.1, 0.8, 8, dtype=F64)
    merged = merge_one(PCB(density=1.0, coefficient=1.0), delta[None])
    assert merged[0] == 0
    assert bool((merged[1:] > 0).all())


@pytest.mark.parametrize(("density", "mask_rate"), [(0.1, 0.9), (0.7, 0.3), (0.8, 0.2), (0.9, 0.1)])
def test_ties_of_mergelm_keeps_what_its_mask_rate_keeps(density: float, mask_rate: float) -> None:
    assert TIES(density=density, preset="mergelm").count_kept(1000) == 1000 - int(1000 * mask_rate) + 1


@pytest.mark.parametrize("preset", ["paper", "mergelm", "mergekit", "peft"])
def test_ties_at_density_one_trims_nothing(preset: str) -> None:
    method = TIES(density=1.0, preset=preset)
    assert method.count_kept(1000) == 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_model_trimming_is_exact_against_a_sort_of_all_entries(dtype: torch.dtype) -> None:
    base, experts, fishers = make_world(dtype=dtype)
    merged = run(
        TIES(density=0.13, preset="sum", coefficient=1.0), base, {"task_0": experts["task_0"]}, fishers
    )
    names = [n for n in base if base[n].is_floating_point()]
    delta = torch.cat([(experts["task_0"][n] - base[n]).flatten() for n in names])
    kept = int(0.13 * len(delta)) + 1
    threshold = delta.abs().sort(descending=True).values[kept - 1]
    wanted = torch.where(delta.abs() >= threshold, delta, 0)
    trimmed = torch.cat([(merged[n] - base[n]).flatten() for n in names])
    assert torch.equal(trimmed != 0, wanted != 0)


def test_consensus_keeps_what_enough_experts_use() -> None:
    deltas = torch.tensor([[1.0, 1.0, 0.3, 1.0], [1.0, 0.0, 0.3, -1.0], [1.0, 0.0, -0.1, 0.1]], dtype=F64)
    # tall = 1/2: expert t uses an entry where |δ_t| > |τ − δ_t| / 2; τ = [3, 1, 0.5, 0.1]
    masks = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]])
    total = deltas.sum(dim=0)
    for k in range(4):
        merged = merge_one(ConsensusTA(k=k, tall=0.5, coefficient=1.0), deltas)
        assert measure_error(merged, total * (masks.sum(dim=0) >= k)) < 1e-12, k
    by_expert = merge_one(ConsensusTA(k=1, tall=[0.5, 9.0, 9.0], coefficient=1.0), deltas)
    assert torch.equal(by_expert != 0, torch.tensor([False, True, True, True]))


def test_consensus_refuses_more_agreement_than_experts_and_thresholds_of_others() -> None:
    with pytest.raises(InputError, match=r"k is 3.*2 experts"):
        merge_one(ConsensusTA(k=3), draw(2, 4))
    with pytest.raises(InputError, match="weights name 'svhn', which"):
        merge_one(ConsensusTA(tall={"svhn": 0.3}), draw(2, 4))


def test_slerp_goes_from_the_first_expert_to_the_second_along_the_arc() -> None:
    base, deltas = draw(3, 4), draw(2, 3, 4, seed=1)
    for t, expert in ((0.0, 0), (1.0, 1)):
        assert measure_error(merge_one(SLERP(t=t), deltas, base), deltas[expert]) < 1e-12
    a, b = torch.tensor([[3.0, 0.0], [0.0, 3.0]], dtype=F64)
    point = torch.tensor([3 * math.cos(math.pi / 6), 1.5], dtype=F64)
    assert measure_error(merge_one(SLERP(t=1 / 3), torch.stack([a, b])), point) < 1e-12
    start = draw(2)
    assert measure_error(merge_one(SLERP(t=1 / 3), torch.stack([a, b]) - start, start) + start, point) < 1e-12
    backwards = merge_one(SLERP(t=2 / 3), torch.stack([b, a]))
    assert measure_error(backwards, point) < 1e-12


def test_slerp_is_linear_between_parallel_and_opposite_tensors() -> None:
    a = draw(5)
    assert measure_error(merge_one(SLERP(t=0.25), torch.stack([a, 3 * a])), 1.5 * a) < 1e-12
    assert measure_error(merge_one(SLERP(t=0.25), torch.stack([a, -a])), 0.5 * a) < 1e-12
    assert measure_error(merge_one(SLERP(t=0.25), torch.stack([0 * a, a])), math.sin(math.pi / 8) * a) < 1e-12
    assert torch.equal(merge_one(SLERP(), torch.zeros(2, 3)), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_numbers_of_opposite_signs_do_not_make_rounding_large(dtype: torch.dtype) -> None:
    for numbers, mean in (([1.0, -0.9], 0.95), ([1.0, 1.2, -0.9], 3.1 / 3), ([1.0, 1.1, 0.9, -0.05], 3.05 / 4)):
        deltas = torch.tensor(numbers, dtype=dtype)[:, None]
        assert merge_one(Karcher(task_vectors=True), deltas).item() == pytest.approx(mean, rel=1e-6)
    for numbers in ([1.0, -0.9], [0.3, -0.7], [0.2, 0.6, -0.1, -0.3]):
        deltas = torch.tensor(numbers, dtype=dtype)[:, None]
        wanted = sum(numbers) / len(numbers)
        assert merge_one(MultiSLERP(), deltas).item() == pytest.approx(wanted, rel=1e-6)


def test_model_stock_moves_to_the_mean_by_the_angle() -> None:
    a = torch.tensor([1.0, 0.0], dtype=F64)
    for angle in (0.0, 0.3, 1.0, math.pi / 2):
        b = torch.tensor([math.cos(angle), math.sin(angle)], dtype=F64)
        cosine = math.cos(angle)
        wanted = 2 * cosine / (1 + cosine) * (a + b) / 2
        for scale in (1.0, 1e-6):
            merged = merge_one(ModelStock(), scale * torch.stack([a, b]))
            assert float((merged / scale - wanted).norm()) < 1e-12
    assert torch.equal(merge_one(ModelStock(), torch.stack([a, -a])), torch.zeros(2, dtype=F64))
    assert torch.equal(merge_one(ModelStock(), torch.zeros(2, 3)), torch.zeros(3))


def test_model_stock_takes_an_angle_for_each_row_if_asked() -> None:
    deltas = draw(3, 4, 5)
    rows = torch.stack([merge_one(ModelStock(), deltas[:, i]) for i in range(4)])
    assert measure_error(merge_one(ModelStock(filter_wise=True), deltas), rows) < 1e-12
    assert measure_error(merge_one(ModelStock(), deltas), rows) > 1e-2
    vector = deltas[:, 0]
    assert torch.equal(merge_one(ModelStock(filter_wise=True), vector), merge_one(ModelStock(), vector))


def test_model_stock_notes_task_vectors_that_oppose_each_other() -> None:
    notes: dict = {}
    deltas = torch.tensor([[1.0, 0.0], [-0.6, 0.8]], dtype=F64)
    merge_one(ModelStock(), deltas, notes=notes)
    assert notes["w"]["ratio"] == pytest.approx(2 * -0.6 / (1 - 0.6))


@pytest.mark.parametrize(
    "method",
    [WUDI(all_matrices=True, steps=5), IsoC(), IsoCTS(common=0.4), ConsensusTA(k=0), RegMean(), Breadcrumbs()],
    ids=repr,
)
def test_weights_scale_the_experts_before_they_are_merged(method: Method) -> None:
    """The stated meaning of `λ` (for `RegMean` without Grams; for `Breadcrumbs` through its inner method)."""
    deltas = draw(3, 6, 7)
    factors = [0.5, 2.0, 0.0]
    scaled = deltas * torch.tensor(factors, dtype=F64)[:, None, None]
    if isinstance(method, Breadcrumbs):
        with_weights = replace(method, inner=TaskArithmetic(weights=factors))
    else:
        with_weights = replace(method, weights=factors)
    options = {"statistics": {"gram": [{}] * 3}} if method.side_inputs else {}
    assert (
        measure_error(merge_one(with_weights, deltas, **options), merge_one(method, scaled, **options)) < 1e-9
    )


def test_an_average_of_two_is_slerp_half_way_between_tensors_of_one_direction() -> None:
    base, deltas = 100 + draw(4, 5), 0.01 * draw(2, 4, 5, seed=1)
    assert measure_error(merge_one(SLERP(), deltas, base), merge_one(WeightAverage(), deltas, base)) < 1e-9


def test_fisher_refuses_what_it_cannot_normalize_and_what_overflows() -> None:
    deltas = draw(2, 3).float()
    nothing, small, large = ({"w": torch.full((3,), value)} for value in (0.0, 1e-30, 3e38))
    with pytest.raises(InputError, match=r"fisher of 1 is 0 everywhere"):
        merge_one(Fisher(normalize="norm"), deltas, fishers=[large, nothing])
    merged = merge_one(Fisher(normalize="norm", floor=0.0), deltas, fishers=[small, large])
    assert measure_error(merged, deltas.mean(dim=0)) < 1e-6
    with pytest.raises(InputError, match=r"merging w overflows torch.float32"):
        merge_one(Fisher(), deltas, fishers=[large, large])


def test_whole_model_trimming_of_a_model_without_entries_is_that_model() -> None:
    assert merge_one(TIES(), torch.zeros(2, 0, 3)).shape == (0, 3)


def test_lines_scales_layers_from_first_to_first_plus_slope_and_stacks_each_for_itself() -> None:
    names = ["embed", "a.layers.0.w", "a.layers.1.w", "a.layers.2.w", "b.blocks.0.w", "b.blocks.1.w", "norm"]
    base = {name: torch.zeros(2) for name in names}
    merged = merge_state_dicts(
        base, [{n: torch.ones(2) for n in names}], LiNeS(first=0.5, slope=1.0, inner=ONE)
    )
    assert [float(merged[name][0]) for name in names] == [0.5, 0.5, 1.0, 1.5, 0.5, 1.5, 0.5]


def test_lines_takes_the_norm_of_what_is_merged_into_account() -> None:
    deltas = draw(3, 400)
    ties = TIES(density=0.2)
    merged = merge_one(ties, deltas)
    factor = float(deltas.sum(dim=0).abs().sum() / merged.abs().sum()) / 3
    assert measure_error(merge_one(LiNeS(inner=ties), deltas), factor * merged) < 1e-12
    with pytest.raises(InputError, match="give first"):
        merge_one(LiNeS(inner=ConsensusTA()), deltas)
    assert measure_error(merge_one(LiNeS(inner=ONE), deltas), deltas.mean(dim=0)) < 1e-12


def test_ram_counts_own_and_shared_entries_over_the_model_or_a_tensor() -> None:
    deltas = [
        {"w": torch.tensor([1.0, 1.0, 0.0, 0.0]), "v": torch.tensor([1.0, 0.0])},
        {"w": torch.tensor([0.0, 3.0, 2.0, 0.0]), "v": torch.tensor([0.0, 0.0])},
    ]
    base = {"w": torch.zeros(4), "v": torch.zeros(2)}
    plain = merge_state_dicts(base, deltas, RAM())
    assert plain["w"].tolist() == [1.0, 2.0, 2.0, 0.0]
    of_model = merge_state_dicts(base, deltas, RAM(boost=1.0, bound=10.0))  # ratios 1/2 and 1/1
    assert of_model["w"].tolist() == [1.5, 2.0, 4.0, 0.0]
    assert of_model["v"].tolist() == [1.5, 0.0]
    of_tensor = merge_state_dicts(base, deltas, RAM(boost=1.0, bound=10.0, scope="tensor"))
    assert of_tensor["w"].tolist() == [2.0, 2.0, 4.0, 0.0]
    assert of_tensor["v"].tolist() == [1.0, 0.0]
