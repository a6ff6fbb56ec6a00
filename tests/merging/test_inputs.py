"""Each wrong input has one clear error that names it."""

import weakref
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import Tensor

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import align, write_tensors
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
    IsoC,
    IsoCTS,
    Method,
    ModelStock,
    RegMean,
    TaskArithmetic,
    WeightAverage,
    blocks,
    merge_state_dicts,
)
from mergekit_lab.merging.inputs import open_inputs


def make_state(**changes):
    tensors = {"w": torch.zeros(3, 2), "b": torch.zeros(3), "ids": torch.arange(4)}
    return {k: v for k, v in (tensors | changes).items() if v is not None}


def refuse(match: str, base=None, experts=None, method=None, **options) -> None:
    with pytest.raises(InputError, match=match):
        merge_state_dicts(
            base or make_state(),
            {"svhn": make_state()} if experts is None else experts,
            method or WeightAverage(),
            **options,
        )


def test_missing_tensors_are_named_with_their_expert() -> None:
    refuse(r"'svhn' lacks 2 tensors.*\(b, w\)", experts={"svhn": make_state(w=None, b=None)})


def test_extra_tensors_are_named_with_their_expert() -> None:
    refuse(r"'svhn' has 1 tensors.*lacks \(head\)", experts={"svhn": make_state(head=torch.ones(1))})


@pytest.mark.parametrize("method", [TaskArithmetic(), TIES(), TSVM(), ModelStock()])
def test_numbers_that_overflow_on_the_way_are_refused_not_stored(method: Method) -> None:
    far = [{"w": torch.full((4, 6), -1e38)}] * 2
    refuse("merging w overflows", base={"w": torch.full((4, 6), 1e38)}, experts=far, method=method)


@pytest.mark.parametrize(
    "method",
    [
        TSVM(),
        IsoC(),
        IsoCTS(),
        IsoCTS(common=0.4),
        EpiMer(rank=2),
        WUDI(all_matrices=True),
        DOGE(all_matrices=True),
        Breadcrumbs(density=1.0, inner=IsoC()),
        SLERP(),
        ModelStock(),
        DARE(rescale="l1"),
    ],
    ids=repr,
)
def test_numbers_at_the_end_of_float64_name_the_tensor(method: Method) -> None:
    """Here factorizations give up, or numbers overflow; neither is a traceback of LAPACK."""
    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.zeros(6, 7).double()}
    far = [{"w": 1.7e308 * torch.rand(6, 7, generator=generator, dtype=torch.float64)} for _ in range(2)]
    fishers = {"fishers": [{"w": torch.ones(6, 7)}] * 2} if method.side_inputs else {}
    refuse(r"(merging w overflows torch.float64|^w cannot be factorized)", base, far, method, **fishers)


def test_a_curvature_that_outweighs_all_others_names_the_tensor() -> None:
    generator = torch.Generator().manual_seed(0)
    base, *experts = ({"w": torch.randn(6, 7, generator=generator)} for _ in range(3))
    fishers = [{"w": torch.rand(6, 7, generator=generator)} for _ in range(2)]
    fishers[0]["w"][0, 0] = 1e38
    refuse("w cannot be factorized", base, experts, EpiMer(rank=2), fishers=fishers)


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


def test_numbers_of_numpy_are_pythons() -> None:
    method = DARE(density=numpy.float32(0.5), seed=numpy.int64(3), inner=TIES(density=numpy.float16(0.5)))
    assert repr(method) == repr(DARE(density=0.5, seed=3, inner=TIES(density=0.5)))
    for wrong, match in ((numpy.float32(2), r"density is 2.0; .*\(0, 1\]"), (numpy.True_, "density is True")):
        with pytest.raises(InputError, match=match):
            DARE(density=wrong)
    with pytest.raises(InputError, match=r"seed is 3\.0; it must be a whole number"):
        DARE(density=0.5, seed=numpy.float32(3))


def test_a_class_of_ones_own_may_take_more_than_its_parent() -> None:
    own = derive(TIES, {"density": float | None, "preset": str}, density=None)
    own().check(["a", "b"])


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod."])
def test_names_that_differ_by_a_prefix_are_refused_with_the_way_to_align_them(prefix: str, tmp_path) -> None:
    base = {"a.w": torch.zeros(3), "b.w": torch.ones(2)}
    expert = {prefix + name: value + 1 for name, value in base.items()}
    named = rf"lacks 2 .* \(a.w, b.w\); has 2 .*\({prefix}a.w, {prefix}b.w\): these are the base's"
    refuse(named, base=base, experts={"svhn": expert})
    aligned = align(open_checkpoint(base), open_checkpoint(expert))
    merged = merge_state_dicts(base, {"svhn": aligned}, WeightAverage())
    assert merged["a.w"].tolist() == [1, 1, 1]
    out = mergekit_lab.merge(base, {"svhn": expert}, tmp_path / "out", WeightAverage(), device="cpu")
    assert dict(open_checkpoint(out))["b.w"].tolist() == [2, 2]
    refuse("another backbone", base=base, experts={"svhn": {prefix + "c.w": torch.zeros(3)}})


def test_shapes_that_differ_are_named_with_both_shapes() -> None:
    refuse(r"w \[2, 3\] where the base has \[3, 2\]", experts={"svhn": make_state(w=torch.zeros(2, 3))})


def test_an_integer_tensor_in_place_of_a_float_is_named() -> None:
    refuse("b torch.int64.*torch.float32", experts={"svhn": make_state(b=torch.zeros(3).long())})


def test_integer_buffers_that_differ_are_refused() -> None:
    refuse(
        r"'svhn'.*\(ids\)",
        experts={"svhn": make_state(ids=torch.ones(4).long())},
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_entry_is_found_with_its_expert_and_tensor(value: float) -> None:
    broken = make_state(w=torch.tensor([[0.0, value], [0, 0], [0, 0]]))
    refuse("'w' of svhn.*1 NaN", experts={"dtd": make_state(), "svhn": broken})
    refuse("'w' of svhn.*1 NaN", experts={"dtd": make_state(), "svhn": broken}, method=TSVM())
    refuse("'w' of the base.*1 NaN", base=broken)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "method",
    [
        TaskArithmetic(coefficient=0.5, weights=[1, 0]),
        TaskArithmetic(coefficient=0.0001),
        DARE(density=0.01),
        DARE(density=0.01, inner=TIES(preset="mergekit")),
        TIES(density=0.2),
    ],
)
def test_a_non_finite_entry_is_found_where_the_method_has_no_use_for_it(method: Method, value: float) -> None:
    broken = make_state(w=torch.tensor([[0.0, value], [1, 2], [3, 4]]))
    refuse("'w' of svhn.*1 NaN", experts={"dtd": make_state(), "svhn": broken}, method=method)


def test_no_experts_is_an_error() -> None:
    refuse("no expert was given", experts={})
    refuse("no expert was given", experts=[])


def test_one_state_dict_in_place_of_several_is_an_error() -> None:
    refuse("'w'.*Tensor", experts=make_state())
    refuse("'w' is a float", experts={"w": 1.0})
    refuse(".experts/svhn.", experts="experts/svhn")


def test_missing_and_mismatched_side_inputs_are_named() -> None:
    refuse("Fisher needs a fisher checkpoint", method=Fisher())
    refuse("fisher inputs are for", method=Fisher(), fishers={"dtd": make_state()})
    refuse(
        r"'fisher.*lacks 1 tensors.*\(w\)",
        method=EpiMer(),
        fishers=[make_state(w=None)],
    )
    refuse("not both", method=Fisher(), fishers=[make_state()], statistics={"fisher": [make_state()]})


def test_statistics_that_no_method_takes_are_named() -> None:
    refuse("'fihser'.*'fisher'", statistics={"fihser": [make_state()]})


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: DARE(inner=m), lambda m: Breadcrumbs(inner=m)])
def test_a_pattern_of_weights_that_matches_no_merged_tensor_is_named(wrap) -> None:
    method = wrap(TaskArithmetic(weights=[{"w": 0.5, "v*": 1.0}]))
    refuse(r"weights is 'v\*'", method=method)
    refuse(r"pattern of weights is 'w'", method=wrap(TaskArithmetic(weights=[{"w": 0.5}])), exclude=["w"])


def test_a_string_in_place_of_patterns_is_one_pattern() -> None:
    experts = [make_state(w=torch.ones(3, 2), b=torch.ones(3))]
    for options in ({"include": "*w*"}, {"exclude": "*b*"}):
        merged = merge_state_dicts(make_state(), experts, WeightAverage(), **options)
        assert bool(merged["w"].all())
        assert not bool(merged["b"].any())
    refuse("nothing to merge", include="w", exclude="*")


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


def test_different_values_under_tied_names_are_refused() -> None:
    base = make_state()
    base["head"] = base["w"]
    refuse(r"ties \(head\)", base=base, experts={"svhn": make_state(head=torch.ones(3, 2))})


def test_complex_tensors_that_are_equal_are_copied_and_others_refused() -> None:
    """Tables of rotary embeddings are such buffers."""
    base = make_state(rotations=torch.polar(torch.ones(4), torch.arange(4.0)))
    merged = merge_state_dicts(base, [base], WeightAverage())
    assert torch.equal(merged["rotations"], base["rotations"])
    turned = make_state(rotations=base["rotations"].conj())
    refuse(r"\(rotations\)", base=base, experts={"svhn": turned})


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


def test_regmean_asks_for_its_grams() -> None:
    refuse("RegMean needs a gram", method=RegMean())


@pytest.mark.parametrize("method", [Fisher(), EpiMer()], ids=repr)
@pytest.mark.parametrize(("value", "fault"), [(float("nan"), "NaN or infinite"), (-1.0, "negative")])
def test_a_fisher_that_is_none_is_named_with_its_expert(method, value: float, fault: str) -> None:
    broken = make_state(w=torch.full((3, 2), value))
    refuse(rf"the fisher of svhn holds {fault} entries in \(w\)", method=method, fishers=[broken])


def test_numbers_that_are_not_finite_are_refused_before_any_work() -> None:
    refuse("0, and not all", method=EpiMer(weights=[-1.0]), fishers=[make_state()])
    refuse("brought to one scale", method=EpiMer(normalize="trace"), fishers=[make_state()])


def test_a_result_that_its_dtype_cannot_hold_is_refused() -> None:
    large = make_state(w=torch.full((3, 2), 9e4))
    refuse("'w'.*torch.float16.*dtype", base=large, experts=[large], dtype=torch.float16)


@pytest.mark.parametrize("method", [TaskArithmetic(coefficient=3e38), TSVM(coefficient=-1e38)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_coefficient_that_overflows_is_refused_not_stored(method: Method, dtype) -> None:
    base, far = {"w": torch.zeros(4, 6)}, {"w": torch.eye(4, 6) * 40}
    refuse("torch.float32.*coefficient", base=base, experts=[far, far], method=method, dtype=dtype)


def test_what_stays_the_bases_is_no_less_checked_for_overflow() -> None:
    large = make_state(w=torch.full((3, 2), 1e5), mask=torch.tensor([0.0, -torch.inf]))
    refuse(
        "'w' overflows torch.float16", base=large, experts=[large], dtype=torch.float16, exclude=["w", "mask"]
    )
    kept = {"dtype": torch.float16, "exclude": ["mask"]}
    merged = merge_state_dicts(
        large | {"w": torch.ones(3, 2)}, [large | {"w": torch.ones(3, 2)}], WeightAverage(), **kept
    )
    assert torch.equal(merged["mask"], large["mask"].half())
    double = {name: tensor.double() * 1e300 for name, tensor in large.items()}
    kept["dtype"] = torch.float32
    refuse("'w'.*torch.float32.*dtype.*float64", base=double, experts=[double], **kept)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_merged_as_far_as_it_reaches(dtype: torch.dtype) -> None:
    """The cast to float8 gives its largest number for all beyond it, so overflow must be seen before."""
    largest = torch.finfo(dtype).max
    low, high = (
        make_state(w=torch.full((3, 2), largest / 2).to(dtype)),
        make_state(w=torch.full((3, 2), largest).to(dtype)),
    )
    merged = merge_state_dicts(low, [high], TaskArithmetic(coefficient=1.0))["w"]
    assert torch.equal(merged.float(), high["w"].float())
    refuse("'w' overflows torch.float8", base=low, experts=[high], method=TaskArithmetic(coefficient=2.0))


@pytest.mark.parametrize("scale", ["w_scale_inv", "w_scale"])
def test_quantised_weights_are_refused_with_what_to_do(scale: str) -> None:
    packed = make_state(w=torch.ones(3, 2).to(torch.float8_e4m3fn), **{scale: torch.ones(3)})
    refuse(r"base is quantized \(1", base=packed, experts=[packed])


@pytest.mark.parametrize(
    ("name", "beside"), [("q.weight", "q.weight.absmax"), ("q.weight", "q.SCB"), ("q.qweight", "q.qzeros")]
)
def test_packed_weights_are_known_by_their_names_where_no_configuration_is(name: str, beside: str) -> None:
    packed = make_state(**{name: torch.ones(3, 2, dtype=torch.int8), beside: torch.ones(3)})
    refuse(rf"the base is quantized \(1 tensors: {name}\)", base=packed, experts=[packed])


def test_what_a_configuration_calls_quantised_is_refused_if_it_is(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    write_tensors(tmp_path / "model.safetensors", make_state())
    merge_state_dicts(tmp_path, [tmp_path], WeightAverage())
    write_tensors(tmp_path / "model.safetensors", make_state(qweight=torch.ones(3, 2, dtype=torch.int32)))
    refuse(r"is quantized \(1 tensors: qweight\)", base=tmp_path, experts=[tmp_path])


def test_a_device_that_is_not_there_is_named() -> None:
    refuse("device 'cud'", device="cud")
    refuse("device 'cuda:99'", device="cuda:99")
    refuse("empty list", device=[])


def test_a_model_without_anything_to_merge_is_refused() -> None:
    refuse("nothing to merge", exclude=["*"])
    refuse("matches no floating-point tensor", exclude=["ids"])
    refuse("the embedding", exclude=["lm_head.*"])


def test_patterns_reach_tied_weights_under_any_of_their_names() -> None:
    base = make_state()
    base["head"] = base["w"]
    expert = make_state(w=torch.ones(3, 2), b=torch.ones(3), head=torch.ones(3, 2))
    kept = merge_state_dicts(base, [expert], WeightAverage(), exclude=["head"])
    assert float(kept["w"].sum()) == float(kept["head"].sum()) == 0
    assert float(kept["b"].sum()) == 3
    only = merge_state_dicts(base, [expert], WeightAverage(), include=["head"])
    assert float(only["w"].sum()) == float(only["head"].sum()) == 6
    assert float(only["b"].sum()) == 0


def test_a_pass_over_side_inputs_holds_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CPU_BLOCK", 4)
    base = {"w": torch.zeros(40)}
    inputs = open_inputs(base, [base, base], Fisher(), {"fisher": [{"w": torch.ones(40)}] * 2})
    reader = blocks.Reader(inputs, Fisher(), torch.device("cpu"))
    seen = [weakref.ref(block) for block in reader.read_side_blocks("fisher")]
    assert len(seen) == 10
    assert all(block() is None for block in seen)
