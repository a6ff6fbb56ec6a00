"""What every method must obey."""

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from merging.conftest import to_dtype
from merging.world import assert_close, assert_equal, make_world, run

from mergekit_lab import InputError
from mergekit_lab.merging import (
    CAT,
    DARE,
    DELLA,
    DOGE,
    EMR,
    PCB,
    RAM,
    SCE,
    SLERP,
    TIES,
    TSVC,
    TSVM,
    WUDI,
    AdaMerging,
    ArceeFusion,
    Breadcrumbs,
    ConsensusTA,
    CoreSpace,
    EpiMer,
    Fisher,
    IsoC,
    IsoCTS,
    Karcher,
    KnOTS,
    LiNeS,
    Localization,
    LocalizeStitch,
    Method,
    ModelStock,
    MultiSLERP,
    NearSwap,
    NuSLERP,
    Passthrough,
    RegMean,
    RegMeanPlusPlus,
    TaskArithmetic,
    WeightAverage,
    blocks,
    jobs,
    merge_state_dicts,
    merge_tensors,
)

PAGE = (Path(__file__).parents[2] / "docs" / "add_merger.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLE: dict[str, Any] = {"__name__": "example"}
exec(next(block for block in BLOCKS if "class Median" in block), EXAMPLE)
Median = EXAMPLE["Median"]

METHODS: dict[str, Method] = {
    "median": Median(coefficient=0.5),
    "average": WeightAverage(),
    "task_arithmetic": TaskArithmetic(coefficient=0.3),
    "ties": TIES(density=0.3),
    "ties_mergelm": TIES(density=0.3, preset="mergelm"),
    "ties_sum": TIES(density=0.3, preset="sum"),
    "ties_max": TIES(density=0.3, aggregator="max"),
    "ties_mergekit": TIES(density=0.3, preset="mergekit"),
    "ties_mergekit_sum": TIES(density=0.3, preset="mergekit", aggregator="sum"),
    "ties_peft": TIES(density=0.3, preset="peft"),
    "dare": DARE(density=0.5),
    "dare_l1": DARE(density=0.5, rescale="l1"),
    "dare_ties": DARE(density=0.5, inner=TIES(density=0.3)),
    "dare_l1_ties": DARE(density=0.5, rescale="l1", inner=TIES(preset="mergekit", density=0.7)),
    "dare_l1_fisher": DARE(density=0.5, rescale="l1", inner=Fisher(normalize="norm")),
    "fisher": Fisher(),
    "fisher_normalized": Fisher(normalize="norm"),
    "fisher_trace": Fisher(normalize="trace"),
    "fisher_favor_target": Fisher(favor_target=True, floor=0.5),
    "fisher_mergelm": Fisher(preset="mergelm", normalize="norm"),
    "tsvm": TSVM(),
    "tsvm_rank": TSVM(rank=2),
    "epimer": EpiMer(rank=2),
    "epimer_full": EpiMer(rank=2, coordinates="full", aggregator="mean"),
    "epimer_normalized": EpiMer(rank=2, normalize="trace"),
    "wudi": WUDI(lr=1e-4),
    "wudi_all_matrices": WUDI(all_matrices=True, steps=20, lr=1e-3),
    "iso_c": IsoC(),
    "iso_cts": IsoCTS(),
    "iso_cts_own": IsoCTS(common=0.4),
    "regmean": RegMean(),
    "regmean_shrunk": RegMean(ratio=0.9, ridge=0.1),
    "regmean_plusplus": RegMeanPlusPlus(),
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
    "nuslerp": NuSLERP(),
    "nuslerp_columns": NuSLERP(along="first", task_vectors=False),
    "multislerp": MultiSLERP(),
    "karcher": Karcher(),
    "sce": SCE(density=0.4),
    "sce_mergekit": SCE(preset="mergekit"),
    "ram": RAM(epsilon=0.1),
    "ram_plus": RAM(epsilon=0.1, boost=0.5),
    "ram_plus_by_tensor": RAM(epsilon=0.1, boost=0.5, scope="tensor"),
    "nearswap": NearSwap(t=0.05),
    "arcee_fusion": ArceeFusion(),
    "passthrough": Passthrough(factor=0.5),
    "lines": LiNeS(first=0.4),
    "lines_ties": LiNeS(first=0.4, inner=TIES(density=0.3)),
    "lines_tsvm": LiNeS(first=0.4, inner=TSVM()),
    "pcb": PCB(density=0.3),
    "pcb_all": PCB(density=1.0),
    "doge": DOGE(steps=20),
    "doge_all_matrices": DOGE(steps=20, lr=1e-3, all_matrices=True, subspace=2),
    "localize_stitch": LocalizeStitch(density=0.3),
    "localize_stitch_learned": LocalizeStitch(learn=Localization()),
    "emr": EMR(),
    "emr_authors": EMR(preset="authors"),
    "tsvc": TSVC(),
    "knots": KnOTS(inner=TIES(density=0.3)),
    "cat": CAT(rank=2, penalty=0.1),
    "core_space": CoreSpace(),
    "core_space_ties": CoreSpace(rank=2, inner=TIES(density=0.3, preset="core_space")),
}
DEPEND_ON_THE_ORDER_OF_EXPERTS = {
    "fisher_favor_target",  # floors the first expert's Fisher only
    "slerp_asymmetric",  # t counts from the first expert
    "nearswap",  # takes the second where it is near the first
    "arcee_fusion",  # as nearswap
    "cat",  # projects task vectors off one expert's directions after another's
}
NO_COEFFICIENT = {
    "average",
    "fisher",
    "fisher_normalized",
    "fisher_trace",
    "fisher_favor_target",
    "fisher_mergelm",
    "dare_l1_fisher",
    "della_fisher",
    "regmean",
    "regmean_shrunk",
    "regmean_plusplus",
    "emr",
    "emr_authors",
    "adamerging",
    "adamerging_layer_wise",
    "slerp",
    "slerp_asymmetric",
    "model_stock",
    "model_stock_filter_wise",
    "nuslerp",
    "nuslerp_columns",
    "multislerp",
    "karcher",
    "nearswap",
    "arcee_fusion",
    "passthrough",
}
NEED_TWO = ("slerp", "slerp_asymmetric", "nuslerp", "nuslerp_columns", "nearswap", "arcee_fusion")
EXPERTS = dict.fromkeys(NEED_TWO, 2) | {"passthrough": 1}
THIRDS = (1 / 3, 1 / 3, 1 / 3)
MEAN = TaskArithmetic(weights=THIRDS, coefficient=1.0)
# As they are, but for what scales or thins out.
IDENTICAL_EXPERTS = {
    "median": Median(),
    "task_arithmetic": MEAN,
    "ties": TIES(density=1.0),
    "ties_mergelm": TIES(density=1.0, preset="mergelm"),
    "ties_sum": TIES(density=1.0, preset="sum", weights=THIRDS, coefficient=1.0),
    "ties_max": TIES(density=1.0, aggregator="max"),
    "ties_mergekit": TIES(density=1.0, preset="mergekit"),
    "ties_mergekit_sum": TIES(density=1.0, preset="mergekit", aggregator="sum", weights=THIRDS),
    "ties_peft": TIES(density=1.0, preset="peft"),
    "dare": DARE(density=1.0, inner=MEAN),
    "dare_l1": DARE(density=1.0, rescale="l1", inner=MEAN),
    "dare_ties": DARE(density=1.0, inner=TIES(density=1.0)),
    "dare_l1_ties": DARE(density=1.0, rescale="l1", inner=TIES(preset="mergekit", density=1.0)),
    "dare_l1_fisher": DARE(density=1.0, rescale="l1", inner=Fisher()),
    "breadcrumbs": Breadcrumbs(density=1.0, inner=MEAN),
    "breadcrumbs_ties": Breadcrumbs(density=1.0, inner=TIES(preset="mergekit", density=1.0)),
    "della": DELLA(density=1.0),
    "della_l1": DELLA(density=1.0, rescale="l1", inner=MEAN),
    "della_fisher": DELLA(density=1.0, inner=Fisher()),
    "consensus": ConsensusTA(weights=THIRDS, coefficient=1.0),
    "consensus_by_expert": ConsensusTA(tall=[0.2, 0.4, 0.6], weights=THIRDS, coefficient=1.0),
    "adamerging": AdaMerging(weights=THIRDS),
    "adamerging_layer_wise": AdaMerging(weights=[{"a.*": 0.1, "*": 0.4}, {"a.*": 0.5}, {"a.*": 0.4}]),
    "sce": SCE(),
    "ram": RAM(epsilon=0.0),
    "ram_plus": RAM(epsilon=0.0, boost=0.5),
    "ram_plus_by_tensor": RAM(epsilon=0.0, boost=0.5, scope="tensor"),
    "passthrough": Passthrough(),
    "lines": LiNeS(inner=MEAN, first=1.0),
    "lines_ties": LiNeS(inner=TIES(density=1.0), first=1.0),
    "knots": KnOTS(inner=TIES(density=1.0)),
    "localize_stitch": LocalizeStitch(density=1.0),
}
IDENTICAL_EXPERTS_BECOME_ANOTHER = {
    "tsvm": "directions that experts share are whitened away from each other",
    "tsvm_rank": "as tsvm, and the rank is capped",
    "breadcrumbs_tsvm": "as tsvm",
    "epimer": "directions as tsvm's",
    "epimer_full": "directions as tsvm's",
    "epimer_normalized": "directions as tsvm's",
    "wudi": "Adam starts at the sum, and other tensors keep the base",
    "wudi_all_matrices": "Adam starts at the sum",
    "iso_c": "the spectrum becomes flat",
    "iso_cts": "the spectrum becomes flat",
    "iso_cts_own": "the spectrum becomes flat",
    "lines_tsvm": "as tsvm",
    "pcb": "tails are clamped, and what has no balance is left out",
    "pcb_all": "tails are clamped",
    "doge": "all get one norm, and their largest entries alone stay",
    "doge_all_matrices": "as doge",
    "core_space": "as tsvm",
    "core_space_ties": "the rank is capped, and entries are trimmed",
    "cat": "each is in the others' way",
    "tsvc": "it is the sum of parts",
    "localize_stitch_learned": "an entry outside all masks is the base's",
}
ONE_EXPERT = {
    "median": Median(),
    "task_arithmetic": TaskArithmetic(coefficient=1.0),
    "ties": TIES(density=1.0),
    "ties_mergelm": TIES(density=1.0, preset="mergelm"),
    "ties_sum": TIES(density=1.0, preset="sum", coefficient=1.0),
    "ties_max": TIES(density=1.0, aggregator="max"),
    "ties_mergekit": TIES(density=1.0, preset="mergekit"),
    "ties_mergekit_sum": TIES(density=1.0, preset="mergekit", aggregator="sum"),
    "ties_peft": TIES(density=1.0, preset="peft"),
    "dare": DARE(density=1.0, inner=TaskArithmetic(coefficient=1.0)),
    "dare_l1": DARE(density=1.0, rescale="l1", inner=TaskArithmetic(coefficient=1.0)),
    "dare_ties": DARE(density=1.0, inner=TIES(density=1.0)),
    "dare_l1_ties": DARE(density=1.0, rescale="l1", inner=TIES(preset="mergekit", density=1.0)),
    "dare_l1_fisher": DARE(density=1.0, rescale="l1", inner=Fisher()),
    "epimer": EpiMer(rank=None),
    "epimer_full": EpiMer(rank=None, coordinates="full", aggregator="mean"),
    "epimer_normalized": EpiMer(rank=None, normalize="trace"),
    "breadcrumbs": Breadcrumbs(density=1.0, inner=TaskArithmetic(coefficient=1.0)),
    "breadcrumbs_ties": Breadcrumbs(density=1.0, inner=TIES(preset="mergekit", density=1.0)),
    "breadcrumbs_tsvm": Breadcrumbs(density=1.0, inner=TSVM()),
    "della": DELLA(density=1.0),
    "della_l1": DELLA(density=1.0, rescale="l1", inner=TaskArithmetic(coefficient=1.0)),
    "della_fisher": DELLA(density=1.0, inner=Fisher()),
    "consensus": ConsensusTA(k=1, coefficient=1.0),
    "consensus_by_expert": ConsensusTA(k=1, tall=[0.2], coefficient=1.0),
    "adamerging": AdaMerging(weights=[1.0]),
    "adamerging_layer_wise": AdaMerging(weights=[{"*": 1.0}]),
    "sce": SCE(),
    "ram": RAM(epsilon=0.0),
    "ram_plus": RAM(epsilon=0.0, boost=0.5),
    "ram_plus_by_tensor": RAM(epsilon=0.0, boost=0.5, scope="tensor"),
    "passthrough": Passthrough(),
    "lines": LiNeS(first=1.0, inner=TaskArithmetic(coefficient=1.0)),
    "lines_ties": LiNeS(first=1.0, inner=TIES(density=1.0)),
    "knots": KnOTS(inner=TIES(density=1.0)),
    "localize_stitch": LocalizeStitch(density=1.0),
    "core_space": CoreSpace(),
    "cat": CAT(coefficient=1.0),
}
ONE_EXPERT_BECOMES_ANOTHER = {
    "tsvm_rank": "the rank is capped",
    "wudi": "tensors that are no attention or MLP weights keep the base",
    "iso_c": "the spectrum becomes flat",
    "iso_cts": "the spectrum becomes flat",
    "iso_cts_own": "the spectrum becomes flat",
    "lines_tsvm": "scaled by 0.4",
    "pcb": "what has no balance is left out",
    "pcb_all": "tails are clamped",
    "doge": "it gets another norm, and its largest entries alone stay",
    "doge_all_matrices": "as doge",
    "core_space_ties": "the rank is capped, and entries are trimmed",
    "localize_stitch_learned": "an entry outside its mask is the base's",
}
NEED_TWO_EXPERTS = {*NEED_TWO, "model_stock", "model_stock_filter_wise"}
WITHOUT_WEIGHTS = NEED_TWO_EXPERTS - {"nuslerp", "nuslerp_columns"} | {"sce", "sce_mergekit", "passthrough"}
every_method = pytest.mark.parametrize("label", METHODS)


def make_world_for(label: str, **options):
    return make_world(experts=EXPERTS.get(label, 3), **options)


@cache
def merge_as_it_is(label: str):
    """What the method makes of the world in float32, which several laws compare with."""
    return run(METHODS[label], *make_world_for(label))


@every_method
def test_the_order_of_experts_does_not_matter(label: str) -> None:
    base, experts, fishers = make_world_for(label)
    forwards = merge_as_it_is(label)
    backwards = run(METHODS[label], base, dict(reversed(experts.items())), fishers)
    if label in DEPEND_ON_THE_ORDER_OF_EXPERTS:
        with pytest.raises(AssertionError):
            assert_close(backwards, forwards)
    else:
        assert_close(backwards, forwards, 2e-6)


@every_method
def test_the_order_of_tensors_does_not_matter(label: str) -> None:
    base, experts, fishers = make_world_for(label)
    shuffled = {name: dict(reversed(expert.items())) for name, expert in experts.items()}
    other_base = dict(reversed(base.items()))
    merged = run(METHODS[label], other_base, shuffled, fishers)
    assert_close({n: merged[n] for n in base}, merge_as_it_is(label))


@every_method
def test_the_size_of_blocks_does_not_matter(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, experts, fishers = make_world_for(label)
    monkeypatch.setattr(blocks, "CPU_BLOCK", 29)
    assert_close(run(METHODS[label], base, experts, fishers), merge_as_it_is(label), 1e-7)


@every_method
def test_dtypes_shapes_buffers_and_order_are_kept_and_inputs_stay_as_they_are(
    label: str,
) -> None:
    """In float16, and with a tensor that has no entries; other laws compare tensors of the other dtypes."""
    base, experts, fishers = make_world_with_an_empty_tensor(label)
    merged = run(METHODS[label], base, experts, fishers)
    assert list(merged) == list(base)
    assert all(merged[n].dtype == base[n].dtype and merged[n].shape == base[n].shape for n in base)
    assert torch.equal(merged["position_ids"], base["position_ids"])
    assert merged["position_ids"].data_ptr() != base["position_ids"].data_ptr()
    untouched = make_world_with_an_empty_tensor(label)
    assert_equal(base, untouched[0])
    for name in experts:
        assert_equal(experts[name], untouched[1][name])
        assert_equal(fishers[name], untouched[2][name])


def make_world_with_an_empty_tensor(label: str):
    base, experts, fishers = make_world_for(label, dtype=torch.float16)
    for state in (base, *experts.values(), *fishers.values()):
        state["empty"] = torch.zeros(0, 4, dtype=base["a.bias"].dtype)
    return base, experts, fishers


@every_method
def test_half_precision_is_merged_in_float32(label: str) -> None:
    base, experts, fishers = make_world_for(label, dtype=torch.bfloat16)
    exact = run(
        METHODS[label],
        to_dtype(base, torch.float32),
        {n: to_dtype(e, torch.float32) for n, e in experts.items()},
        fishers,
    )
    assert_equal(run(METHODS[label], base, experts, fishers), to_dtype(exact, torch.bfloat16))


@every_method
def test_coefficient_zero_is_the_base_bit_for_bit(label: str) -> None:
    base, experts, fishers = make_world_for(label, dtype=torch.bfloat16)
    base["a.bias"][0] = -0.0
    method = METHODS[label]
    if label in NO_COEFFICIENT:
        with pytest.raises(InputError, match="no coefficient"):
            method.with_coefficient(0.0)
        return
    merged = run(method.with_coefficient(0.0), base, experts, fishers)
    assert_equal(merged, base)
    assert math.copysign(1, float(merged["a.bias"][0])) == -1


@pytest.mark.parametrize("label", [label for label in METHODS if label not in NO_COEFFICIENT])
def test_the_result_is_linear_in_the_coefficient(label: str) -> None:
    """One merge serves a whole coefficient search."""
    base, experts, fishers = make_world_for(label, dtype=torch.float64)
    once = run(METHODS[label].with_coefficient(1.0), base, experts, fishers)
    twice = run(METHODS[label].with_coefficient(-2.0), base, experts, fishers)
    assert_close(twice, {n: base[n] - 2 * (once[n] - base[n]) for n in base}, 1e-12)


@every_method
def test_identical_experts_merge_to_themselves(label: str) -> None:
    base, experts, fishers = make_world_for(label)
    one = experts["task_0"]
    method = IDENTICAL_EXPERTS.get(label, METHODS[label])
    merged = run(method, base, dict.fromkeys(experts, one), fishers)
    if label in IDENTICAL_EXPERTS_BECOME_ANOTHER:
        with pytest.raises(AssertionError):
            assert_close(merged, one, 1e-3)
    else:
        assert_close(merged, one)


@every_method
def test_one_expert_at_coefficient_one_is_that_expert(label: str) -> None:
    base, experts, fishers = make_world(experts=1)
    method = ONE_EXPERT.get(label, METHODS[label])
    if label in NEED_TWO_EXPERTS:
        with pytest.raises(InputError, match=r"(at least|exactly) two"):
            run(method, base, experts, fishers)
        return
    merged = run(method, base, experts, fishers)
    if label in ONE_EXPERT_BECOMES_ANOTHER:
        with pytest.raises(AssertionError):
            assert_close(merged, experts["task_0"], 1e-3)
    else:
        assert_close(merged, experts["task_0"], 1e-5)


def test_what_laws_say_of_methods_is_said_of_methods_that_there_are_and_once() -> None:
    stated = (IDENTICAL_EXPERTS, IDENTICAL_EXPERTS_BECOME_ANOTHER, ONE_EXPERT, ONE_EXPERT_BECOMES_ANOTHER)
    for labels in (*stated, NO_COEFFICIENT, EXPERTS, NEED_TWO_EXPERTS, DEPEND_ON_THE_ORDER_OF_EXPERTS):
        assert set(labels) <= set(METHODS)
    for variants, exceptions in (stated[:2], stated[2:]):
        assert not set(variants) & set(exceptions)
        assert all(type(variants[label]) is type(METHODS[label]) for label in variants)


def test_tied_weights_stay_tied_and_are_merged_once() -> None:
    base, experts, _ = make_world()
    base["head.weight"] = base["a.weight"]
    for expert in experts.values():
        expert["head.weight"] = expert["a.weight"].clone()
    merged = merge_state_dicts(base, experts, TIES(density=0.3))
    assert merged["head.weight"] is merged["a.weight"]
    plain_base, plain_experts, _ = make_world()
    assert torch.equal(
        merged["a.weight"], merge_state_dicts(plain_base, plain_experts, TIES(density=0.3))["a.weight"]
    )


def test_tensors_are_merged_one_by_one_as_the_iterator_advances() -> None:
    base, experts, _ = make_world()
    whole = merge_state_dicts(base, experts, WeightAverage())
    iterator = merge_tensors(base, experts, WeightAverage())
    name, first = next(iterator)
    assert torch.equal(first, whole[name])
    assert {name, *(name for name, _ in iterator)} == set(base)


def with_weights(method: Method, weights) -> Method:
    """With these, which are the inner method's where there is one."""
    inner = getattr(method, "inner", None)
    return (
        replace(method, weights=weights)
        if inner is None
        else replace(method, inner=with_weights(inner, weights))
    )


@every_method
def test_weights_may_differ_by_tensor(label: str) -> None:
    """A tensor with its own weights is merged as in a merge where all tensors have them."""
    base, experts, fishers = make_world_for(label, dtype=torch.float64)
    if label in WITHOUT_WEIGHTS:
        with pytest.raises(InputError, match="weights is"):
            with_weights(METHODS[label], [1.0] * len(experts))
        return
    patterns = {name: {"a.*": 1.0 + t / 2, "*": 1.0} for t, name in enumerate(experts)}
    mixed, plain, scaled = (
        run(with_weights(METHODS[label], weights), base, experts, fishers)
        for weights in (patterns, [1.0] * len(experts), [1.0 + t / 2 for t in range(len(experts))])
    )
    for name in mixed:
        assert torch.equal(mixed[name], (scaled if name.startswith("a.") else plain)[name]), name
    assert not torch.equal(plain["a.bias"], scaled["a.bias"]) or label in ONLY_MATRICES


ONLY_MATRICES = {"wudi", "doge"}


@pytest.mark.parametrize("block", [1 << 17, 11])
@pytest.mark.parametrize("label", [label for label in METHODS if METHODS[label].pools])
def test_pooling_small_tensors_changes_nothing(label: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device several tensors share a block; here the CPU is treated as one."""
    base, experts, fishers = make_world_for(label)
    plain = run(METHODS[label], base, experts, fishers, dtype=torch.float64)
    monkeypatch.setattr(blocks.Reader, "pools", property(lambda self: self.method.pools))
    monkeypatch.setattr(jobs, "plan_jobs", lambda reader: [list(reader.inputs.merged)])
    monkeypatch.setattr(blocks, "CPU_BLOCK", block)
    assert_close(run(METHODS[label], base, experts, fishers, dtype=torch.float64), plain, 1e-7)
