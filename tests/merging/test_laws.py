"""What every method must obey."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from merging.conftest import to_dtype
from merging.methods import (
    DEPEND_ON_THE_ORDER_OF_EXPERTS,
    EXPERTS,
    IDENTICAL_EXPERTS,
    IDENTICAL_EXPERTS_BECOME_ANOTHER,
    METHODS,
    NEED_TWO_EXPERTS,
    NO_COEFFICIENT,
    ONE_EXPERT,
    ONE_EXPERT_BECOMES_ANOTHER,
    WITHOUT_WEIGHTS,
)
from merging.world import assert_close, assert_equal, make_world, run

from mergekit_lab import InputError
from mergekit_lab.merging import (
    TIES,
    Method,
    WeightAverage,
    blocks,
    jobs,
    merge_state_dicts,
    merge_tensors,
)

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
