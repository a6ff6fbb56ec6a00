"""Saving, loading, copying and hooks, for every optimizer: nothing that matters is lost."""

import copy
import inspect
from functools import partial

import pytest
import torch

from mergekit_lab import optim
from optim.problems import (
    BASES,
    OPTIMIZERS,
    Net,
    Problem,
    assert_close,
    assert_differ,
    assert_equal_bits,
    make_required,
    train,
)

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("base", BASES)
@every_optimizer
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(make, base, dtype, tmp_path) -> None:
    first = Problem(dtype)
    optimizer = make(first.model.named_parameters(), base=BASES[base])
    for _ in range(3):
        optimizer.step(first.closure)
    saved = {"model": first.model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "last.pt")

    loaded = torch.load(tmp_path / "last.pt", weights_only=True)
    second = Problem(dtype, seed=1)
    second.x, second.y = first.x, first.y
    second.model.load_state_dict(loaded["model"])
    resumed = make(second.model.named_parameters(), base=BASES[base])
    resumed.load_state_dict(loaded["optimizer"])
    assert resumed.param_groups is resumed.base.param_groups
    assert resumed.state is resumed.base.state
    for _ in range(3):
        resumed.step(second.closure)
    assert_equal_bits(second.copy_weights(), train(make, base, 6, dtype))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@every_optimizer
def test_state_of_float32_goes_on_with_parameters_of_another_dtype(make, dtype, base) -> None:
    first = Problem(torch.float32)
    optimizer = make(first.model.named_parameters(), base=BASES[base])
    for _ in range(3):
        optimizer.step(first.closure)
    second = Problem(dtype)
    second.model.load_state_dict(first.model.state_dict())
    other = make(second.model.named_parameters(), base=BASES[base])
    other.load_state_dict(optimizer.state_dict())
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    kept = [t for name in other.saved_tensors for t in getattr(other, name).values()]
    assert {t.dtype for t in kept} <= {wide, torch.bool}
    for problem, each in ((first, optimizer), (second, other)):
        for _ in range(2):
            each.step(problem.closure)
    assert {p.dtype for p in second.model.parameters()} == {dtype}
    if dtype is torch.float64 and base == "sgd" and not hasattr(other, "seed"):  # noise depends on the dtype
        weights = {name: weights.float() for name, weights in second.copy_weights().items()}
        assert_close(weights, first.copy_weights(), 1e-3)


@every_optimizer
def test_loading_restores_every_hyper_parameter(make) -> None:
    saved = make(Net().named_parameters(), base=partial(torch.optim.AdamW, lr=0.02)).state_dict()
    problem = Problem()
    cls = type(make(Net().named_parameters(), base=BASES["sgd"]))
    base = partial(torch.optim.AdamW, lr=0.5)
    optimizer = cls(problem.model.named_parameters(), base=base, **make_required(cls))
    assert optimizer.state_dict() != saved or type(optimizer) is optim.SAM
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict() == saved
    settings = inspect.signature(type(optimizer)).parameters.keys() - {
        "named_parameters",
        "base",
        "task_vectors",
    }
    assert settings <= set(optimizer.saved_attributes)


@every_optimizer
def test_a_loaded_state_is_not_changed_by_later_steps(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["sgd"])
    for _ in range(3):
        optimizer.step(problem.closure)
    saved = copy.deepcopy(optimizer.state_dict()["wrapper"])
    kept = copy.deepcopy(saved)
    again = Problem()
    twin = make(again.model.named_parameters(), base=BASES["sgd"])
    twin.load_state_dict({**copy.deepcopy(optimizer.state_dict()), "wrapper": saved})
    for _ in range(3):
        twin.step(again.closure)
    for name, value in kept.items():
        if name in twin.saved_tensors:
            assert_equal_bits(saved[name], value)
        else:
            assert saved[name] == value


@every_optimizer
def test_a_deep_copy_goes_on_alike_and_apart(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("original"))
    optimizer.step(problem.closure)
    twin, twin_optimizer = copy.deepcopy((problem, optimizer))
    assert twin_optimizer.param_groups is twin_optimizer.base.param_groups
    twin_optimizer.step(twin.closure)
    assert_differ(twin.copy_weights(), problem.copy_weights())
    optimizer.step(problem.closure)
    assert_equal_bits(twin.copy_weights(), problem.copy_weights())
    assert calls == ["original"] * 2


@every_optimizer
def test_hooks_on_step_and_state_dict_are_called_once(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["sgd"])
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "epoch": 3})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["epoch"]))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after loading"))
    optimizer.step(problem.closure)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before step", "after step", "before saving", 3, "after loading"]
