"""Settings of methods that are wrong, or do not fit the experts, have one clear error that names them."""

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from merging.conftest import make_state, refuse
from torch import Tensor

from mergekit_lab import InputError
from mergekit_lab.merging import (
    DARE,
    DELLA,
    DOGE,
    SLERP,
    TIES,
    TSVM,
    WUDI,
    Breadcrumbs,
    ConsensusTA,
    EpiMer,
    Fisher,
    IsoCTS,
    Method,
    ModelStock,
    RegMean,
    TaskArithmetic,
    WeightAverage,
    merge_state_dicts,
)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TaskArithmetic(coefficient=1e308),
        lambda: Fisher(floor=1e308),
        lambda: EpiMer(floor=1e39),
        lambda: TSVM(coefficient=1e308).check(["a"]),
        lambda: WeightAverage(weights=[1e39]).check(["a"]),
        lambda: RegMean(ridge=10**39).check(["a"]),
        lambda: ConsensusTA(tall=10**400),
        lambda: TSVM(coefficient=10**30),
    ],
)
def test_settings_that_float32_does_not_hold_are_refused_before_any_work(make) -> None:
    with pytest.raises(InputError, match="finite in float32"):
        make()


def derive(parent, hints, kw_only: bool = True, **space):
    own = type("Own", (parent,), {"__annotations__": hints, **space})
    return dataclass(frozen=True, kw_only=kw_only)(own)


def set_nan(self: Method) -> None:
    object.__setattr__(self, "coefficient", float("nan"))


FIRST = derive(Method, {"density": float}, kw_only=False, density=0.5)


@pytest.mark.parametrize(
    ("own", "options", "match"),
    [
        (derive(TIES, {"file": "Absent | None"}, file=None), {"density": 5}, r"density is 5; .*\(0, 1\]"),
        (derive(TIES, {"density": float}, density=0.5), {"density": 5}, r"density is 5; .*\(0, 1\]"),
        (derive(TIES, {"preset": str}, preset="paper"), {"preset": "papr"}, "did you mean 'paper'"),
        (derive(Method, {"n": float | Tensor}, n=0.5), {"n": float("nan")}, "n is nan; it must be finite"),
        (derive(TSVM, {}, __post_init__=set_nan), {}, "coefficient is nan"),
        (derive(SLERP, {}, weigh_experts=lambda self, experts: [1.0]), {}, "exactly two experts, not 3"),
        (derive(DARE, {}, most=2), {}, "at most two experts, not 3"),
        (DARE, {"inner": FIRST("x")}, "density is 'x'; it must be a number"),
    ],
)  # fmt: skip
def test_a_class_of_ones_own_is_checked_however_its_settings_are_set(own, options, match: str) -> None:
    with pytest.raises(InputError, match=match):
        own(**options).check(["a", "b", "c"])


def test_a_class_of_ones_own_may_take_more_than_its_parent() -> None:
    own = derive(TIES, {"density": float | None, "preset": str}, density=None)
    own().check(["a", "b"])
    parent = derive(Method, {"way": Literal["a", "b"]}, way="a")
    derive(parent, {"way": Literal["a", "b", "c"]}, way="c")().check(["a"])
    derive(Method, {"table": dict[tuple[int, int], float]})(table={(1, 2): 0.5}).check(["a"])


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: DARE(inner=m), lambda m: Breadcrumbs(inner=m)])
def test_a_pattern_of_weights_that_matches_no_merged_tensor_is_named(wrap) -> None:
    method = wrap(TaskArithmetic(weights=[{"w": 0.5, "v*": 1.0}]))
    refuse(r"weights is 'v\*'", method=method)
    refuse(r"pattern of weights is 'w'", method=wrap(TaskArithmetic(weights=[{"w": 0.5}])), exclude=["w"])


def test_weights_must_fit_the_experts() -> None:
    refuse("2 weights.*for 1 experts", method=WeightAverage(weights=[1, 2]))
    refuse("'svnh',.*'svhn'", method=WeightAverage(weights={"svnh": 1}))
    refuse(
        "lack a number for dtd",
        experts={"svhn": make_state(), "dtd": make_state()},
        method=TIES(weights={"svhn": 1.0}),
    )
    refuse("sum to zero", method=WeightAverage(weights=[0.0]))
    refuse("sum to zero", experts=[make_state()] * 3, method=WeightAverage(weights=[0.3, -0.2, -0.1]))
    half = {"w": 1.0, "b": -0.5}
    refuse(r"\[-0.5, 0.5\], sum to zero", experts=[make_state()] * 2, method=WeightAverage(weights=[half, 0.5]))


def test_weights_name_experts_by_number() -> None:
    base, experts = {"w": torch.zeros(2)}, {1: {"w": torch.ones(2)}, 2: {"w": torch.full((2,), 3.0)}}
    method = TaskArithmetic(coefficient=1.0, weights={2: 1, 1: 0.5})
    assert merge_state_dicts(base, experts, method)["w"].tolist() == [3.5, 3.5]
    method = ConsensusTA(coefficient=1.0, k=1, tall={2: 0.5, 1: 1})
    assert merge_state_dicts(base, experts, method)["w"].tolist() == [4.0, 4.0]
    method = TaskArithmetic(weights={1: 1, 3: 1})
    refuse("weights name '3', which", base=base, experts=experts, method=method)


@pytest.mark.parametrize("coefficient", [[0.5], "0.5", True], ids=str)
def test_a_coefficient_that_is_no_number_is_refused(coefficient) -> None:
    for method in (TIES, TSVM):
        with pytest.raises(InputError, match="coefficient"):
            method(coefficient=coefficient)


@pytest.mark.parametrize(
    "weight", [True, 10**400, "x", None, float("nan"), {"w": "a"}], ids=lambda value: str(value)[:5]
)
def test_a_weight_that_is_no_number_is_refused(weight) -> None:
    with pytest.raises(InputError, match=r"weights is .*; it must be"):
        TIES(weights=[weight])


def test_an_inner_method_is_one() -> None:
    for method in (DARE, DELLA, Breadcrumbs):
        with pytest.raises(InputError, match=r"inner is 0\.5"):
            method(inner=0.5)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TIES(density=0.0), r"density is 0.0.*\(0, 1\]"),
        (lambda: TIES(density=1.5), "density is 1.5"),
        (lambda: TIES(preset="papr"), "did you mean 'paper'"),
        (lambda: TIES(election="mas"), "did you mean 'mass'"),
        (lambda: TIES(aggregator="som"), "did you mean 'sum'"),
        (lambda: Fisher(normalize=True), "normalize is True"),
        (lambda: TIES(preset="peft", count_buffers=True), "whole-model"),
        (lambda: DARE(density=0.0), r"density is 0.0.*\(0, 1\]"),
        (lambda: DARE(rescale="inverted"), "did you mean 'inverse'"),
        (lambda: DARE(weights=[1.0]), "give them to the"),
        (lambda: Fisher(floor=-1.0), "floor is -1.0"),
        (lambda: Fisher(preset="mergelm", favor_target=True), "favor_target"),
        (lambda: TSVM(rank=0), "rank is 0.*least 1"),
        (lambda: EpiMer(floor=0.0), "floor is 0.0"),
        (lambda: EpiMer(coordinates="tag"), "did you mean 'tagged'"),
        (lambda: WUDI(steps=-1), "steps is -1.*least 0"),
        (lambda: WUDI(lr=0.0), "lr is 0.0; it must be positive"),
        (lambda: DOGE(size=0.0), "size is 0.0"),
        (lambda: DOGE(density=1.1), r"density is 1.1.*\(0, 1\]"),
        (lambda: DOGE(subspace=0.5), "subspace is 0.5.*least 1"),
        (lambda: DOGE(steps=-1), "steps is -1.*least 0"),
        (lambda: DOGE(lr=0.0), "lr is 0.0; it must be positive"),
        (lambda: DOGE(steps=20.0), "steps is 20.0"),
        (lambda: DOGE(density="0.5"), "density is '0.5'"),
        (lambda: SLERP(t=True), "t is True"),
        (lambda: TSVM(rank="all"), "rank is 'all'"),
        (lambda: TaskArithmetic(coefficient={}), "coefficient is {}"),
        (lambda: TIES(count_buffers=1j), "count_buffers is 1j"),
        (lambda: DOGE(lr=1e38), r"lr is 1e\+38.*1e\+30"),
        (lambda: IsoCTS(common=1.2), r"common is 1.2.*\[0, 1\]"),
        (lambda: RegMean(ratio=1.1), r"ratio is 1.1.*\[0, 1\]"),
        (lambda: RegMean(ridge=-1.0), "ridge is -1.0"),
        (lambda: Breadcrumbs(density=0.0), r"density is 0.0.*\(0, 1\]"),
        (lambda: Breadcrumbs(gamma=1.0), r"gamma is 1.0.*\[0, 1\)"),
        (lambda: Breadcrumbs(weights=[1.0]), "give them to the"),
        (lambda: DELLA(density=1.5), r"density is 1.5.*\(0, 1\]"),
        (lambda: DELLA(density=0.9, epsilon=0.1), "epsilon is 0.1.*least 0 and.*0.1"),
        (lambda: DELLA(epsilon=-0.1), "epsilon is -0.1"),
        (lambda: DELLA(rescale="l2"), "rescale is 'l2'"),
        (lambda: ConsensusTA(k=-1), "k is -1"),
        (lambda: ConsensusTA(tall=-0.1), "tall is -0.1.*least 0"),
        (lambda: ConsensusTA(tall={"svhn": -0.1}), "be at least 0"),
        (lambda: SLERP(t=1.5), r"t is 1.5.*\[0, 1\]"),
        (lambda: SLERP(weights=[1.0, 1.0]), "t says how much"),
        (lambda: ModelStock(weights=[1.0, 1.0]), "the experts count equally"),
        (lambda: TaskArithmetic(coefficient=float("nan")), "finite"),
        (lambda: TaskArithmetic(coefficient=[float("nan")]), "finite"),
        (lambda: TIES(coefficient=float("inf")), "coefficient is inf"),
        (lambda: WeightAverage(weights=1), "weights is 1"),
        (lambda: WeightAverage(weights="one"), "weights is 'one'"),
        (lambda: TaskArithmetic(coefficient=[1.0], weights=[1.0]), "not both"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused_by_name(make, match: str) -> None:
    with pytest.raises(InputError, match=match):
        make()


def test_l1_rescaling_refuses_an_inner_method_that_surveys_the_model() -> None:
    refuse("TIES surveys the task", method=DARE(rescale="l1", inner=TIES()))


def test_methods_of_so_many_experts_say_how_many_they_take() -> None:
    refuse("exactly two experts, not 1", method=SLERP())
    refuse("exactly two experts, not 3", experts=[make_state()] * 3, method=SLERP())
    refuse("at least two experts, not 1", method=ModelStock())


def test_numbers_that_are_not_finite_are_refused_before_any_work() -> None:
    refuse("0, and not all", method=EpiMer(weights=[-1.0]), fishers=[make_state()])
    refuse("brought to one scale", method=EpiMer(normalize="trace"), fishers=[make_state()])
