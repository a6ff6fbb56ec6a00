"""Each wrong input has one clear error that names it."""

import weakref

import numpy
import pytest
import torch
from merging.conftest import make_state, refuse

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import align, write_tensors
from mergekit_lab.merging import (
    DARE,
    DOGE,
    SLERP,
    TIES,
    TSVM,
    WUDI,
    Breadcrumbs,
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


def test_numbers_of_numpy_are_pythons() -> None:
    method = DARE(density=numpy.float32(0.5), seed=numpy.int64(3), inner=TIES(density=numpy.float16(0.5)))
    assert repr(method) == repr(DARE(density=0.5, seed=3, inner=TIES(density=0.5)))
    weights = [numpy.float32(0.5), torch.tensor(0.25), {"w": numpy.float64(1)}]
    assert repr(TaskArithmetic(weights=weights)) == repr(TaskArithmetic(weights=[0.5, 0.25, {"w": 1.0}]))
    assert TaskArithmetic(weights=range(2)).weigh_experts(["a", "b"]) == [0.0, 1.0]
    for wrong, match in ((numpy.float32(2), r"density is 2.0; .*\(0, 1\]"), (numpy.True_, "density is True")):
        with pytest.raises(InputError, match=match):
            DARE(density=wrong)
    with pytest.raises(InputError, match=r"seed is 3\.0; it must be a whole number"):
        DARE(density=0.5, seed=numpy.float32(3))


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


def test_a_string_in_place_of_patterns_is_one_pattern() -> None:
    experts = [make_state(w=torch.ones(3, 2), b=torch.ones(3))]
    for options in ({"include": "*w*"}, {"exclude": "*b*"}):
        merged = merge_state_dicts(make_state(), experts, WeightAverage(), **options)
        assert bool(merged["w"].all())
        assert not bool(merged["b"].any())
    refuse("nothing to merge", include="w", exclude="*")


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


def test_regmean_asks_for_its_grams() -> None:
    refuse("RegMean needs a gram", method=RegMean())


@pytest.mark.parametrize("method", [Fisher(), EpiMer()], ids=repr)
@pytest.mark.parametrize(("value", "fault"), [(float("nan"), "NaN or infinite"), (-1.0, "negative")])
def test_a_fisher_that_is_none_is_named_with_its_expert(method, value: float, fault: str) -> None:
    broken = make_state(w=torch.full((3, 2), value))
    refuse(rf"the fisher of svhn holds {fault} entries in \(w\)", method=method, fishers=[broken])


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
