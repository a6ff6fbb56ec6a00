"""What every method must obey, and the limit cases each states."""

import math
from dataclasses import replace

import pytest
import torch
from merging.conftest import in_dtype, relative_error
from torch import Tensor

from mergekit_lab.merging import (
    DARE,
    DELLA,
    SLERP,
    TIES,
    TSVM,
    WUDI,
    AdaMerging,
    Breadcrumbs,
    ConsensusTA,
    EpiMer,
    Fisher,
    IsoC,
    IsoCTS,
    Method,
    ModelStock,
    RegMean,
    TaskArithmetic,
    WeightAverage,
    blocks,
    merge_state_dicts,
    merged_tensors,
    stream,
)

METHODS: dict[str, Method] = {
    "average": WeightAverage(),
    "task_arithmetic": TaskArithmetic(coefficient=0.3),
    "ties": TIES(density=0.3),
    "ties_mergelm": TIES(density=0.3, preset="mergelm"),
    "ties_sum": TIES(density=0.3, preset="sum"),
    "ties_mergekit": TIES(density=0.3, preset="mergekit"),
    "ties_peft": TIES(density=0.3, preset="peft"),
    "dare": DARE(drop=0.5),
    "dare_l1": DARE(drop=0.5, rescale="l1"),
    "dare_ties": DARE(drop=0.5, inner=TIES(density=0.3)),
    "dare_l1_ties": DARE(drop=0.5, rescale="l1", inner=TIES(preset="mergekit", density=0.7)),
    "dare_l1_fisher": DARE(drop=0.5, rescale="l1", inner=Fisher(normalise=True)),
    "fisher": Fisher(),
    "fisher_normalised": Fisher(normalise=True),
    "fisher_favor_target": Fisher(favor_target=True, floor=0.5),
    "fisher_mergelm": Fisher(preset="mergelm", normalise=True),
    "tsvm": TSVM(),
    "tsvm_rank": TSVM(rank=2),
    "epimer": EpiMer(rank=2),
    "epimer_full": EpiMer(rank=2, coordinates="full", aggregator="mean"),
    "epimer_normalised": EpiMer(rank=2, normalise="trace"),
    "wudi": WUDI(lr=1e-4),
    "wudi_all_2d": WUDI(all_2d=True, iterations=20, lr=1e-3),
    "iso_c": IsoC(),
    "iso_cts": IsoCTS(),
    "iso_cts_own": IsoCTS(common=0.4),
    "regmean": RegMean(),
    "regmean_shrunk": RegMean(ratio=0.9, ridge=0.1),
    "breadcrumbs": Breadcrumbs(density=0.3, gamma=0.1),
    "breadcrumbs_ties": Breadcrumbs(density=0.3, gamma=0.1, inner=TIES(preset="mergekit", density=1.0)),
    "breadcrumbs_tsvm": Breadcrumbs(density=0.3, gamma=0.1, inner=TSVM()),
    "della": DELLA(density=0.5, epsilon=0.2),
    "della_l1": DELLA(density=0.5, epsilon=0.2, rescale="l1", inner=TaskArithmetic()),
    "della_fisher": DELLA(density=0.5, epsilon=0.2, inner=Fisher()),
    "consensus": ConsensusTA(),
    "consensus_by_expert": ConsensusTA(tall={"task_0": 0.2, "task_1": 0.4, "task_2": 0.6}),
    "adamerging": AdaMerging(),
    "adamerging_layer_wise": AdaMerging(weights={"task_0": {"a.*": 0.1}, "task_1": {"*": 0.7}, "task_2": 0.5}),
    "slerp": SLERP(),
    "slerp_asymmetric": SLERP(t=0.3),
    "model_stock": ModelStock(),
    "model_stock_filter_wise": ModelStock(filter_wise=True),
}
DEPEND_ON_THE_ORDER_OF_EXPERTS = {
    "fisher_favor_target",  # floors the first expert's Fisher only
    "slerp_asymmetric",  # t counts from the first expert
}
NO_COEFFICIENT = (
    "average",
    "fisher",
    "dare_l1_fisher",
    "della_fisher",
    "regmean",
    "adamerging",
    "slerp",
    "model_stock",
)
EXPERTS = {"slerp": 2, "slerp_asymmetric": 2}
IDENTICAL_EXPERTS_MERGE_TO_THEMSELVES = {
    "average": WeightAverage(),
    "task_arithmetic": TaskArithmetic(weights=[1 / 3] * 3, coefficient=1.0),
    "ties": TIES(density=1.0),
    "ties_mergekit": TIES(density=1.0, preset="mergekit"),
    "ties_peft": TIES(density=1.0, preset="peft"),
    "fisher": Fisher(),
    "regmean": RegMean(),
    "adamerging": AdaMerging(weights=[1 / 3] * 3),
    "consensus": ConsensusTA(weights=[1 / 3] * 3, coefficient=1.0),
    "model_stock": ModelStock(),
    "slerp": SLERP(t=0.3),
}
every_method = pytest.mark.parametrize("label", METHODS)


def world(experts: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A base, named experts and Fishers: matrices, a kernel, vectors, a scalar, a buffer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shapes = {
        "a.weight": (12, 7),
        "b.weight": (9, 16),
        "conv.weight": (4, 3, 2, 2),
        "a.bias": (12,),
        "scale": (),
        "attn.out_proj.weight": (8, 8),
    }
    base = {n: draw(*s) for n, s in shapes.items()} | {"position_ids": torch.arange(5)}
    people = {
        f"task_{t}": {n: v + 0.1 * draw(*v.shape) if v.is_floating_point() else v for n, v in base.items()}
        for t in range(experts)
    }
    fishers = {name: {n: draw(*s).square() for n, s in shapes.items()} for name in people}
    return in_dtype(base, dtype), {n: in_dtype(e, dtype) for n, e in people.items()}, fishers


def run(method: Method, base, experts, fishers, **options) -> dict[str, Tensor]:
    available = {"fisher": fishers, "gram": {name: grams(name) for name in experts}}
    statistics = {kind: {n: available[kind][n] for n in experts} for kind in method.side_inputs}
    return merge_state_dicts(base, experts, method, statistics=statistics, **options)


def grams(expert: str) -> dict[str, Tensor]:
    """Input Grams of the world's linear modules, a function of the expert's name."""
    generator = torch.Generator().manual_seed(sum(expert.encode()))
    inputs = {n: torch.randn(40, size, generator=generator) for n, size in (("a", 7), ("b", 16))}
    return {n: x.T @ x for n, x in inputs.items()}


def world_of(label: str, **options):
    return world(experts=EXPERTS.get(label, 3), **options)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert relative_error(found[name], wanted[name]) <= tolerance, name


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


@every_method
def test_the_order_of_experts_does_not_matter(label: str) -> None:
    base, experts, fishers = world_of(label)
    forwards = run(METHODS[label], base, experts, fishers)
    backwards = run(METHODS[label], base, dict(reversed(experts.items())), fishers)
    if label in DEPEND_ON_THE_ORDER_OF_EXPERTS:
        with pytest.raises(AssertionError):
            assert_close(backwards, forwards)
    else:
        assert_close(backwards, forwards, 2e-6)


@every_method
def test_the_order_of_tensors_does_not_matter(label: str) -> None:
    base, experts, fishers = world_of(label)
    shuffled = {name: dict(reversed(expert.items())) for name, expert in experts.items()}
    other_base = dict(reversed(base.items()))
    found = run(METHODS[label], other_base, shuffled, fishers)
    assert_close({n: found[n] for n in base}, run(METHODS[label], base, experts, fishers))


@every_method
def test_the_size_of_blocks_does_not_matter(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, experts, fishers = world_of(label)
    whole = run(METHODS[label], base, experts, fishers)
    monkeypatch.setattr(blocks, "CPU_BLOCK", 5)
    assert_close(run(METHODS[label], base, experts, fishers), whole, 1e-7)


@every_method
def test_inputs_are_not_changed(label: str) -> None:
    base, experts, fishers = world_of(label)
    untouched = world_of(label)
    run(METHODS[label], base, experts, fishers)
    assert_equal(base, untouched[0])
    for name in experts:
        assert_equal(experts[name], untouched[1][name])
        assert_equal(fishers[name], untouched[2][name])


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_shapes_and_buffers_are_kept_in_the_bases_order(label: str, dtype: torch.dtype) -> None:
    base, experts, fishers = world_of(label, dtype=dtype)
    merged = run(METHODS[label], base, experts, fishers)
    assert list(merged) == list(base)
    assert all(merged[n].dtype == base[n].dtype and merged[n].shape == base[n].shape for n in base)
    assert torch.equal(merged["position_ids"], base["position_ids"])
    assert merged["position_ids"].data_ptr() != base["position_ids"].data_ptr()


@every_method
def test_half_precision_is_merged_in_float32(label: str) -> None:
    base, experts, fishers = world_of(label, dtype=torch.bfloat16)
    exact = run(
        METHODS[label],
        in_dtype(base, torch.float32),
        {n: in_dtype(e, torch.float32) for n, e in experts.items()},
        fishers,
    )
    assert_equal(run(METHODS[label], base, experts, fishers), in_dtype(exact, torch.bfloat16))


@every_method
def test_coefficient_zero_is_the_base_bit_for_bit(label: str) -> None:
    base, experts, fishers = world_of(label, dtype=torch.bfloat16)
    base["a.bias"][0] = -0.0
    method = METHODS[label]
    if label.startswith(NO_COEFFICIENT):
        with pytest.raises(ValueError, match="no coefficient"):
            method.at(0.0)
        return
    merged = run(method.at(0.0), base, experts, fishers)
    assert_equal(merged, base)
    assert math.copysign(1, float(merged["a.bias"][0])) == -1


@pytest.mark.parametrize("label", [label for label in METHODS if not label.startswith(NO_COEFFICIENT)])
def test_the_result_is_linear_in_the_coefficient(label: str) -> None:
    """One merge serves a whole coefficient search."""
    base, experts, fishers = world_of(label, dtype=torch.float64)
    once = run(METHODS[label].at(1.0), base, experts, fishers)
    twice = run(METHODS[label].at(-2.0), base, experts, fishers)
    assert_close(twice, {n: base[n] - 2 * (once[n] - base[n]) for n in base}, 1e-12)


@pytest.mark.parametrize("label", IDENTICAL_EXPERTS_MERGE_TO_THEMSELVES)
def test_identical_experts_merge_to_themselves(label: str) -> None:
    base, experts, fishers = world()
    one = experts["task_0"]
    same = dict.fromkeys(list(experts)[: EXPERTS.get(label, 3)], one)
    assert_close(run(IDENTICAL_EXPERTS_MERGE_TO_THEMSELVES[label], base, same, fishers), one)


@pytest.mark.parametrize(
    "method",
    [
        TaskArithmetic(coefficient=1.0),
        WeightAverage(),
        TIES(density=1.0),
        TSVM(),
        Fisher(),
        WUDI(all_2d=True),
        RegMean(),
        AdaMerging(weights=[1.0]),
        ConsensusTA(k=1, coefficient=1.0),
        Breadcrumbs(density=1.0, inner=TaskArithmetic(coefficient=1.0)),
        DELLA(density=1.0),
    ],
    ids=repr,
)
def test_one_expert_at_coefficient_one_is_that_expert(method: Method) -> None:
    base, experts, fishers = world(experts=1)
    assert_close(run(method, base, experts, fishers), experts["task_0"], 1e-5)


def test_task_arithmetic_takes_a_list_of_coefficients_and_forgets_with_a_negative_one() -> None:
    base, experts, fishers = world()
    merged = run(TaskArithmetic(coefficient=[0.5, -1.0, 0.0]), base, experts, fishers)
    a, b, _ = experts.values()
    wanted = {n: v + 0.5 * (a[n] - v) - (b[n] - v) if v.is_floating_point() else v for n, v in base.items()}
    assert_close(merged, wanted)
    same = run(
        TaskArithmetic(coefficient=1.0, weights={"task_0": 0.5, "task_1": -1.0, "task_2": 0.0}), *world()
    )
    assert_equal(merged, same)


@pytest.mark.parametrize("preset", ["paper", "mergelm", "mergekit", "peft"])
def test_ties_at_density_one_trims_nothing(preset: str) -> None:
    method = TIES(density=1.0, preset=preset)
    assert method.kept(1000) == 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_model_trimming_is_exact_against_a_sort_of_all_entries(dtype: torch.dtype) -> None:
    base, experts, fishers = world(dtype=dtype)
    merged = run(
        TIES(density=0.13, preset="sum", coefficient=1.0), base, {"task_0": experts["task_0"]}, fishers
    )
    names = [n for n in base if base[n].is_floating_point()]
    delta = torch.cat([(experts["task_0"][n] - base[n]).flatten() for n in names])
    kept = int(0.13 * len(delta)) + 1
    threshold = delta.abs().sort(descending=True).values[kept - 1]
    wanted = torch.where(delta.abs() >= threshold, delta, 0)
    found = torch.cat([(merged[n] - base[n]).flatten() for n in names])
    assert torch.equal(found != 0, wanted != 0)


def test_dare_without_dropping_is_its_inner_method() -> None:
    for inner in (TaskArithmetic(coefficient=0.3), TIES(density=0.3), WeightAverage()):
        assert_equal(run(DARE(drop=0.0, inner=inner), *world()), run(inner, *world()))


def test_dare_is_unbiased_and_drops_the_stated_share() -> None:
    base = {"w": torch.zeros(200_000)}
    experts = {"a": {"w": torch.ones(200_000)}}
    merged = run(DARE(drop=0.9, inner=TaskArithmetic(coefficient=1.0)), base, experts, {})["w"]
    assert float((merged != 0).float().mean()) == pytest.approx(0.1, abs=3e-3)
    assert float(merged.mean()) == pytest.approx(1.0, abs=3e-2)


def test_dare_draws_by_expert_tensor_and_seed() -> None:
    base = {"w": torch.zeros(4096), "v": torch.zeros(4096)}
    experts = {name: {"w": torch.ones(4096), "v": torch.ones(4096)} for name in ("a", "b")}

    def mask(seed: int, expert: str, tensor: str) -> Tensor:
        method = DARE(drop=0.5, seed=seed, inner=TaskArithmetic(coefficient=1.0))
        return run(method, base, {expert: experts[expert]}, {})[tensor] != 0

    masks = [mask(0, "a", "w"), mask(1, "a", "w"), mask(0, "b", "w"), mask(0, "a", "v")]
    for i, first in enumerate(masks):
        for second in masks[i + 1 :]:
            assert 0.4 < float((first == second).float().mean()) < 0.6
    assert torch.equal(mask(0, "a", "w"), masks[0])


def test_the_counter_hash_gives_the_published_splitmix64_sequence() -> None:
    """Reference output of SplitMix64 for seed 1234567 (Rosetta Code's worked values)."""
    from mergekit_lab.merging.dropping import Counters, counter_uniform

    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = counter_uniform([Counters(1234567, 0, 4)], torch.device("cpu"))
    assert [int(v * 2**53) for v in found.tolist()] == [p >> 11 for p in published]
    assert torch.equal(counter_uniform([Counters(1234567, 2, 2)], torch.device("cpu")), found[2:])


def test_an_accelerator_draws_the_bits_that_a_cpu_draws() -> None:
    from mergekit_lab.merging.dropping import _IN_CACHE, Counters, _bits_in_cache, _random_bits

    draws = [Counters(-3, 5, _IN_CACHE + 9), Counters(7, 2**40, 11)]
    by_torch = _random_bits(draws, torch.device("cpu"))
    for place, bits in _bits_in_cache(draws):
        assert torch.equal(torch.from_numpy(bits.view("int64")), by_torch[place])


def test_equal_curvature_makes_epimer_tsvm() -> None:
    base, experts, _ = world(dtype=torch.float64)
    flat = {
        name: {n: torch.full_like(v, 0.7) for n, v in base.items() if v.dtype == torch.float64}
        for name in experts
    }
    assert_close(run(EpiMer(rank=2), base, experts, flat), run(TSVM(rank=2), base, experts, {}), 1e-12)


def test_a_large_eps_makes_epimer_tsvm() -> None:
    base, experts, fishers = world(dtype=torch.float64)
    assert_close(
        run(EpiMer(rank=2, eps=1e12), base, experts, fishers), run(TSVM(rank=2), base, experts, {}), 1e-9
    )


def test_scaling_all_curvatures_and_eps_together_changes_nothing() -> None:
    base, experts, fishers = world(dtype=torch.float64)
    scaled = {name: {n: 1024 * v for n, v in f.items()} for name, f in fishers.items()}
    assert_close(
        run(EpiMer(rank=2, eps=1024e-8), base, experts, scaled),
        run(EpiMer(rank=2), base, experts, fishers),
        1e-9,
    )


def test_the_scale_of_one_tasks_fisher_matters_unless_normalised() -> None:
    base, experts, fishers = world(dtype=torch.float64)
    louder = fishers | {"task_0": {n: 100 * v for n, v in fishers["task_0"].items()}}
    for normalise in ("trace", "norm"):
        method = EpiMer(rank=2, eps=1e-12, normalise=normalise)
        assert_close(run(method, base, experts, louder), run(method, base, experts, fishers), 1e-6)
    plain = EpiMer(rank=2)
    with pytest.raises(AssertionError):
        assert_close(run(plain, base, experts, louder), run(plain, base, experts, fishers), 1e-3)


def test_one_expert_of_epimer_is_its_low_rank_truncation() -> None:
    base, experts, fishers = world(experts=1, dtype=torch.float64)
    merged = run(EpiMer(rank=3, coefficient=0.5), base, experts, fishers)
    u, s, vh = torch.linalg.svd(experts["task_0"]["b.weight"] - base["b.weight"], full_matrices=False)
    assert relative_error(merged["b.weight"] - base["b.weight"], 0.5 * (u[:, :3] * s[:3]) @ vh[:3]) < 1e-10


def test_eta_is_never_negative_and_vanishes_at_equal_curvature() -> None:
    base, experts, fishers = world(dtype=torch.float64)
    notes: dict = {}
    run(EpiMer(rank=2), base, experts, fishers, notes=notes)
    gains = [note["eta"] for note in notes.values()]
    assert len(gains) == 3
    assert min(gains) > 0
    same = dict.fromkeys(experts, fishers["task_0"])
    run(EpiMer(rank=2), base, experts, same, notes=notes)
    assert max(abs(note["eta"]) for note in notes.values()) < 1e-12


def test_more_experts_than_directions_leaves_the_matrix_at_the_base_and_says_so() -> None:
    base, experts, fishers = world(experts=8)
    notes: dict = {}
    merged = run(TSVM(), base, experts, fishers, notes=notes)
    assert torch.equal(merged["a.weight"], base["a.weight"])
    assert "more experts than the matrix has directions" in notes["a.weight"]["rank"]


def test_an_expert_equal_to_the_base_and_equal_experts_keep_the_spectral_methods_finite() -> None:
    base, experts, fishers = world()
    notes: dict = {}
    twins = {"task_0": base, "task_1": experts["task_1"], "task_2": experts["task_1"]}
    for method in (TSVM(), EpiMer(rank=2)):
        merged = run(method, base, twins, fishers, notes=notes)
        assert all(bool(torch.isfinite(v).all()) for v in merged.values())
        assert notes["b.weight"]["rank_deficient"]["u"] < notes["b.weight"]["rank_deficient"]["atoms"]
    nothing = dict.fromkeys(experts, base)
    assert_equal(run(TSVM(), base, nothing, fishers), base)


def test_tied_weights_stay_tied_and_are_merged_once() -> None:
    base, experts, _ = world()
    base["head.weight"] = base["a.weight"]
    for expert in experts.values():
        expert["head.weight"] = expert["a.weight"].clone()
    merged = merge_state_dicts(base, experts, TIES(density=0.3))
    assert merged["head.weight"] is merged["a.weight"]
    plain_base, plain_experts, _ = world()
    assert torch.equal(
        merged["a.weight"], merge_state_dicts(plain_base, plain_experts, TIES(density=0.3))["a.weight"]
    )


def test_tensors_are_merged_one_by_one_as_the_iterator_advances() -> None:
    base, experts, _ = world()
    whole = merge_state_dicts(base, experts, WeightAverage())
    iterator = merged_tensors(base, experts, WeightAverage())
    name, first = next(iterator)
    assert torch.equal(first, whole[name])
    assert {name, *(name for name, _ in iterator)} == set(base)


@every_method
def test_a_tensor_without_entries_passes_through(label: str) -> None:
    base, experts, fishers = world(EXPERTS.get(label, 3))
    for state in (base, *experts.values(), *fishers.values()):
        state["empty"] = torch.zeros(0, 4)
    assert run(METHODS[label], base, experts, fishers)["empty"].shape == (0, 4)


@pytest.mark.parametrize("label", ["tsvm", "epimer", "task_arithmetic", "ties", "average"])
def test_weights_may_differ_by_tensor(label: str) -> None:
    """A tensor with its own weights is merged as in a merge where all tensors have them."""
    base, experts, fishers = world(dtype=torch.float64)
    method = METHODS[label]
    if label == "ties":
        method = TIES(density=0.3, preset="mergekit")
    patterns = {name: {"a.*": 1.0 + t, "*": 1.0} for t, name in enumerate(experts)}
    mixed = run(replace(method, weights=patterns), base, experts, fishers)
    plain = run(replace(method, weights=[1.0] * 3), base, experts, fishers)
    scaled = run(replace(method, weights=[1.0, 2.0, 3.0]), base, experts, fishers)
    for name in mixed:
        assert torch.equal(mixed[name], (scaled if name.startswith("a.") else plain)[name]), name


@pytest.mark.parametrize("block", [1 << 17, 11])
@pytest.mark.parametrize("label", [label for label in METHODS if METHODS[label].pools])
def test_pooling_small_tensors_changes_nothing(label: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device several tensors share a block; here the CPU is treated as one."""
    base, experts, fishers = world_of(label)
    plain = run(METHODS[label], base, experts, fishers, dtype=torch.float64)
    monkeypatch.setattr(blocks.Reader, "pools", property(lambda self: self.method.pools))
    monkeypatch.setattr(stream, "jobs_of", lambda reader: [list(reader.inputs.merged)])
    monkeypatch.setattr(blocks, "CPU_BLOCK", block)
    assert_close(run(METHODS[label], base, experts, fishers, dtype=torch.float64), plain, 1e-7)
