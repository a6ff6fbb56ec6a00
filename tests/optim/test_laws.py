"""What holds for every optimizer of the package, whatever it does with the weights."""

import copy
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mergekit_lab import optim
from mergekit_lab.errors import InputError
from mergekit_lab.optim.averaging import Averaging
from optim.problems import (
    BASES,
    LIMITS,
    MOVING,
    OPTIMIZERS,
    Net,
    Problem,
    assert_close,
    assert_differ,
    assert_equal_bits,
    train,
)

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
every_moving_optimizer = pytest.mark.parametrize("make", MOVING.values(), ids=MOVING.keys())
every_optimizer_that_takes_any_loss = pytest.mark.parametrize(
    "make", [pytest.param(make, id=name) for name, make in OPTIMIZERS.items() if name != "mergopt-worst"]
)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d).split(".")[1]
)


def test_every_public_optimizer_and_every_option_is_under_these_laws() -> None:
    assert LIMITS.keys() == OPTIMIZERS.keys()
    built = {describe(make) for make in OPTIMIZERS.values()}
    public = {name for name in optim.__all__ if is_optimizer_class(getattr(optim, name))}
    assert {cls for cls, _ in built} == public
    assert {option for cls, option in built if cls == "ASAM"} == {"samsung", "saft", "printed"}
    assert {option for cls, option in built if cls == "MergOPT"} == {"laplace", "gaussian"}


def is_optimizer_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def describe(make: Any) -> tuple[str, str]:
    optimizer = make(Net().named_parameters(), base=BASES["sgd"])
    option = getattr(optimizer, "scaling", None) or getattr(optimizer, "distribution", "")
    return type(optimizer).__name__, option


@pytest.mark.parametrize(
    ("base", "dtype"),
    [("adamw", torch.float64), ("adamw", torch.float32), ("adamw", torch.bfloat16), ("sgd", torch.float16)],
)
@pytest.mark.parametrize("make", LIMITS.values(), ids=LIMITS.keys())
def test_without_radius_or_scale_it_is_the_base_bit_for_bit_and_evaluates_once(make, base, dtype) -> None:
    ours, plain = Problem(dtype), Problem(dtype)
    optimizer = make(ours.model.named_parameters(), base=BASES[base])
    reference = BASES[base](plain.model.parameters())
    for step in range(4):
        optimizer.step(ours.closure)
        reference.zero_grad()
        plain.closure()
        reference.step()
        assert_equal_bits(ours.copy_weights(), plain.copy_weights())
        assert len(ours.losses) == step + 1


@every_optimizer
def test_it_differs_from_its_base_in_every_tensor(make) -> None:
    plain = Problem()
    reference = BASES["sgd"](plain.model.parameters())
    for _ in range(2):
        reference.step(plain.run_closure_that_zeroes)
    assert_differ(train(make, "sgd", 2), plain.copy_weights())


@every_optimizer
def test_it_evaluates_as_often_as_it_says_and_returns_the_first_loss(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["sgd"])
    for step in range(1, 4):
        loss = optimizer.step(problem.closure)
        assert len(problem.losses) == step * optimizer.evaluations_per_step
        first = problem.losses[-optimizer.evaluations_per_step]
        assert loss.item() == first
        assert not loss.requires_grad
    again = optimizer.steps_done if getattr(optimizer, "worst_of", 1) > 1 else 0  # the worst, once more
    assert len(set(problem.losses)) == len(problem.losses) - again


def test_the_first_loss_is_returned_though_the_closure_reuses_its_buffer() -> None:
    problem = Problem()
    optimizer = optim.SAM(problem.model.named_parameters(), base=BASES["sgd"])
    buffer = torch.zeros((), dtype=torch.float64)
    loss = optimizer.step(lambda: buffer.copy_(problem.closure().detach()))
    assert loss.item() == problem.losses[0] != buffer.item()


@pytest.mark.parametrize("value", [1.25, None])
@every_optimizer_that_takes_any_loss
def test_a_loss_that_is_no_tensor_is_returned_as_it_is(make, value) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["sgd"])

    def closure() -> Any:
        problem.closure()
        return value

    assert optimizer.step(closure) == value


@every_dtype
@every_moving_optimizer
def test_weights_move_for_the_evaluation_and_come_back_bit_for_bit(make, dtype) -> None:
    problem = Problem(dtype)
    optimizer = make(problem.model.named_parameters(), base=partial(torch.optim.SGD, lr=0.0))
    start = problem.copy_weights()
    for _ in range(3):
        optimizer.step(problem.closure)
        assert_equal_bits(problem.copy_weights(), start)
        assert_differ(problem.weights_seen[-1], start)


@every_moving_optimizer
def test_weights_come_back_when_the_closure_fails_where_they_were_moved(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["sgd"])
    start = problem.copy_weights()

    def closure() -> Tensor:
        loss = problem.closure()
        if len(problem.losses) == optimizer.evaluations_per_step:
            assert_differ(problem.copy_weights(), start)
            raise RuntimeError("out of memory")
        return loss

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)
    assert_equal_bits(problem.copy_weights(), start)


@every_optimizer
def test_a_closure_may_zero_gradients_or_leave_them(make) -> None:
    plain, zeroing = Problem(), Problem()
    for problem, closure in ((plain, plain.closure), (zeroing, zeroing.run_closure_that_zeroes)):
        optimizer = make(problem.model.named_parameters(), base=BASES["adamw"])
        for _ in range(3):
            optimizer.step(closure)
    assert_equal_bits(plain.copy_weights(), zeroing.copy_weights())


@pytest.mark.parametrize("steps", [0, 2])
@every_optimizer
def test_gradients_that_no_step_has_used_are_refused_until_they_are_dropped(make, steps) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["sgd"])
    for _ in range(steps):
        optimizer.step(problem.closure)
    start = problem.copy_weights()
    problem.closure()
    for _ in range(2):
        with pytest.raises(InputError, match=r"fc1\.bias.*optimizer\.zero_grad\(\)"):
            optimizer.step(problem.closure)
        assert_equal_bits(problem.copy_weights(), start)
    optimizer.zero_grad()
    optimizer.step(problem.closure)
    assert_equal_bits(problem.copy_weights(), train(make, "sgd", steps + 1))


@pytest.mark.parametrize(
    "between",
    [
        lambda model, optimizer: None,
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        lambda model, optimizer: copy.deepcopy((model, optimizer)),
        lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    ],
    ids=["nothing", "dropped", "zeroed", "zeroed by the model", "copied", "loaded"],
)
@every_optimizer
def test_gradients_that_a_step_has_used_may_stay_or_be_zeroed(make, between) -> None:
    problem = Problem()
    problem.closure()  # those of before the optimizer are nobody's
    optimizer = make(problem.model.named_parameters(), base=BASES["sgd"])
    for _ in range(3):
        between(problem.model, optimizer)
        optimizer.step(problem.closure)
    assert_equal_bits(problem.copy_weights(), train(make, "sgd", 3))


@every_optimizer
def test_a_step_whose_closure_failed_can_be_made_again(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=partial(torch.optim.SGD, lr=0.1))

    def closure() -> Tensor:
        problem.closure()
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(closure)
    optimizer.step(problem.closure)


@every_optimizer
def test_the_closure_has_gradients_enabled_under_no_grad(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["sgd"])
    with torch.no_grad():
        optimizer.step(problem.closure)
    assert_equal_bits(problem.copy_weights(), train(make, "sgd", 1))


@every_optimizer
def test_a_scheduler_of_the_optimizer_acts_on_the_base(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.0)
    assert optimizer.param_groups is optimizer.base.param_groups
    for moves in (True, True, False, False):
        before = problem.copy_weights()
        optimizer.step(problem.closure)
        scheduler.step()
        (assert_differ if moves else assert_equal_bits)(problem.copy_weights(), before)
        if isinstance(optimizer, Averaging):
            optimizer.train()  # an average goes on moving when θ stands still


@every_optimizer
def test_frozen_and_unused_parameters_stay_where_they_are(make) -> None:
    problem = Problem()
    problem.model.fc1.weight.requires_grad_(False)
    problem.model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"])
    start = problem.copy_weights()
    for _ in range(2):
        optimizer.step(problem.closure)
        assert torch.equal(problem.weights_seen[-1]["fc1.weight"], start["fc1.weight"])
    after = problem.copy_weights()
    for name in ("fc1.weight", "unused"):
        assert torch.equal(after.pop(name), start.pop(name))
    assert_differ(after, start)


@every_optimizer
def test_a_zero_gradient_moves_nothing_and_stays_finite(make) -> None:
    w = nn.Parameter(torch.ones(3))
    optimizer = make([("w.weight", w)], base=partial(torch.optim.SGD, lr=0.1))

    def closure() -> Tensor:
        loss = (0 * w).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.equal(w, torch.ones(3))


@every_optimizer_that_takes_any_loss
def test_a_closure_without_backward_leaves_the_weights(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"])
    start = problem.copy_weights()
    assert optimizer.step(lambda: None) is None
    assert_equal_bits(problem.copy_weights(), start)


@every_optimizer
def test_a_sparse_gradient_is_refused_by_name_and_leaves_the_weights(make) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    start = model.weight.detach().clone()
    optimizer = make(model.named_parameters(), base=BASES["sgd"])

    def closure() -> Tensor:
        loss = model(torch.tensor([1, 3])).square().sum()
        loss.backward()
        return loss

    with pytest.raises(InputError, match=r"weight\..*sparse=False"):
        optimizer.step(closure)
    assert torch.equal(model.weight, start)


@every_optimizer
def test_groups_of_named_parameters_keep_their_options_and_change_nothing_else(make) -> None:
    problem = Problem()
    named = list(problem.model.named_parameters())
    groups = [{"params": named[:3], "lr": 0.1}, {"params": iter(named[3:]), "lr": 0.0}]
    optimizer = make(groups, base=BASES["sgd"])
    assert [group["lr"] for group in optimizer.base.param_groups] == [0.1, 0.0]
    optimizer.step(problem.closure)
    whole = train(make, "sgd", 1)
    start = Problem().copy_weights()
    for i, (name, p) in enumerate(named):
        assert torch.equal(p, (whole if i < 3 else start)[name]), name


@every_optimizer
def test_a_base_may_regroup_the_parameters_it_is_given(make) -> None:
    def make_without_decay_on_vectors(params: list[Tensor]) -> torch.optim.Optimizer:
        matrices, others = ([p for p in params if (p.ndim > 1) is wide] for wide in (True, False))
        return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}])

    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=make_without_decay_on_vectors)
    assert optimizer.param_groups[0]["param_names"] == ["fc1.weight", "fc2.weight"]
    start = problem.copy_weights()
    optimizer.step(problem.closure)
    assert_differ(problem.copy_weights(), start)


@every_optimizer
def test_the_groups_of_another_torch_optimizer_are_taken_with_their_names(make) -> None:
    problem = Problem()
    theirs = torch.optim.SGD(problem.model.named_parameters(), lr=0.1, momentum=0.9)
    optimizer = make(theirs.param_groups, base=torch.optim.SGD)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in problem.model.named_parameters()]
    optimizer.step(problem.closure)
    assert_equal_bits(problem.copy_weights(), train(make, "sgd", 1))


@every_optimizer
def test_an_added_group_is_moved_and_trained(make) -> None:
    problem = Problem()
    named = list(problem.model.named_parameters())
    optimizer = make(named[:2], base=BASES["sgd"])
    optimizer.add_param_group({"params": named[2:], "lr": 0.01})
    assert optimizer.param_groups[1]["param_names"] == [name for name, _ in named[2:]]
    start = problem.copy_weights()
    optimizer.step(problem.closure)
    assert_differ(problem.copy_weights(), start)
    if make in MOVING.values():
        assert_differ(problem.weights_seen[-1], start)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "asam-samsung"])
def test_names_are_not_needed_where_the_method_does_not_read_them(name) -> None:
    problem = Problem()
    optimizer = OPTIMIZERS[name](problem.model.parameters(), base=BASES["sgd"])
    optimizer.step(problem.closure)
    assert_equal_bits(problem.copy_weights(), train(OPTIMIZERS[name], "sgd", 1))


@pytest.mark.parametrize("name", ["sam", "asam-saft"])
def test_the_norm_is_over_all_parameters_together(name) -> None:
    problem = Problem()
    optimizer = OPTIMIZERS[name](problem.model.named_parameters(), base=BASES["sgd"])
    start = problem.copy_weights()
    optimizer.step(problem.closure)
    size = 1 if name == "sam" else torch.cat([w.flatten().abs() for w in start.values()])
    moved = torch.cat([(w - start[n]).flatten() for n, w in problem.weights_seen[-1].items()])
    assert_close({"e": (moved / size).norm()}, {"e": torch.tensor(optimizer.rho, dtype=torch.float64)}, 1e-10)


def test_perturbations_of_float16_parameters_survive_small_gradients() -> None:
    moved = {}
    for dtype in (torch.float16, torch.float64):
        w = nn.Parameter(torch.tensor([0.03, -0.05, 0.02], dtype=dtype))
        optimizer = optim.ASAM([w], base=partial(torch.optim.SGD, lr=0.0), rho=0.5, scaling="saft")
        seen = []

        def closure(w=w, seen=seen) -> Tensor:
            seen.append(w.detach().double().clone())
            loss = (w * 1e-5).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        moved[dtype] = seen[1] - seen[0]
    assert torch.allclose(moved[torch.float16], moved[torch.float64], rtol=0.02, atol=2e-5)


def test_first_gradients_are_freed_before_the_second_evaluation() -> None:
    w = nn.Parameter(torch.ones(3))
    optimizer = optim.SAM([w], base=BASES["sgd"])
    alive: list[Any] = []
    first: list[Any] = []

    def closure() -> Tensor:
        alive.extend(ref() is not None for ref in first)
        loss = w.square().sum()
        loss.backward()
        first.append(weakref.ref(w.grad))
        return loss

    optimizer.step(closure)
    assert alive == [False]
