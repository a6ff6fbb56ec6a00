"""MergOPT: train and eval mode, the worst of several, means; its draws are in test_noise.py."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mergekit_lab.errors import InputError
from mergekit_lab.optim import WASAM, MergOPT
from optim.problems import BASES, Problem, assert_close, assert_differ, assert_equal_bits

strong = partial(MergOPT, scale=0.05, coefficients=(0.3, 0.7))
stronger = partial(MergOPT, scale=0.3, coefficients=(0.3, 0.7))


def build(seed: int = 0, base: str = "adamw") -> tuple[Problem, MergOPT]:
    problem = Problem()
    return problem, strong(problem.model.named_parameters(), base=BASES[base], seed=seed)


def step_in_loop(problem: Problem, optimizer: MergOPT) -> None:
    """One step as a plain loop takes it, without a closure."""
    optimizer.zero_grad()
    problem.closure()
    assert optimizer.step() is None


@pytest.mark.parametrize("base", BASES)
def test_with_and_without_closure_give_the_same_weights_and_losses(base) -> None:
    closed, optimizer = build(base=base)
    for _ in range(4):
        optimizer.step(closed.closure)

    open_loop, optimizer = build(base=base)
    optimizer.train()
    for _ in range(4):
        step_in_loop(open_loop, optimizer)
    optimizer.eval()

    in_train_mode, optimizer = build(base=base)
    optimizer.train()
    for _ in range(4):
        optimizer.step(in_train_mode.run_closure_that_zeroes)
    optimizer.eval()

    assert closed.losses == open_loop.losses == in_train_mode.losses
    assert_equal_bits(open_loop.copy_weights(), closed.copy_weights())
    assert_equal_bits(in_train_mode.copy_weights(), closed.copy_weights())


def test_train_and_eval_are_idempotent_and_eval_is_theta_bit_for_bit() -> None:
    problem, optimizer = build()
    for _ in range(3):
        theta = problem.copy_weights()
        optimizer.eval()
        assert_equal_bits(problem.copy_weights(), theta)
        optimizer.train()
        away = problem.copy_weights()
        assert_differ(away, theta)
        optimizer.train()
        assert_equal_bits(problem.copy_weights(), away)
        optimizer.eval()
        optimizer.eval()
        assert_equal_bits(problem.copy_weights(), theta)
        optimizer.train()
        assert_equal_bits(problem.copy_weights(), away)
        step_in_loop(problem, optimizer)
        optimizer.eval()
        assert_differ(problem.copy_weights(), theta)


def test_step_without_closure_moves_on_to_the_point_that_train_would_reach() -> None:
    problem, optimizer = build()
    optimizer.train()
    step_in_loop(problem, optimizer)
    away = problem.copy_weights()
    optimizer.eval()
    optimizer.train()
    assert_equal_bits(problem.copy_weights(), away)


def test_step_without_closure_is_refused_in_eval_mode() -> None:
    problem, optimizer = build()
    problem.closure()
    start = problem.copy_weights()
    with pytest.raises(InputError, match=r"optimizer\.train\(\).*16-mixed"):
        optimizer.step()
    assert_equal_bits(problem.copy_weights(), start)


def test_saved_in_train_mode_and_resumed_equals_uninterrupted() -> None:
    whole, optimizer = build()
    optimizer.train()
    for _ in range(5):
        step_in_loop(whole, optimizer)
    optimizer.eval()

    first, optimizer = build()
    optimizer.train()
    for _ in range(2):
        step_in_loop(first, optimizer)
    state = optimizer.state_dict()
    optimizer.eval()
    second, resumed = build(seed=99)
    second.model.load_state_dict(first.model.state_dict())
    resumed.load_state_dict(state)
    resumed.train()
    for _ in range(3):
        step_in_loop(second, resumed)
    resumed.eval()
    assert_equal_bits(second.copy_weights(), whole.copy_weights())


def test_loading_in_train_mode_is_refused() -> None:
    problem, optimizer = build()
    state = optimizer.state_dict()
    optimizer.train()
    away = problem.copy_weights()
    with pytest.raises(InputError, match=r"optimizer\.eval\(\).*load_state_dict"):
        optimizer.load_state_dict(state)
    assert_equal_bits(problem.copy_weights(), away)


@pytest.mark.parametrize("last_in_closure", [False, True])
def test_micro_batches_accumulate_in_train_mode(last_in_closure: bool) -> None:
    """With the last one in a closure is Lightning's order."""
    whole, optimizer = build(base="sgd")
    optimizer.step(whole.closure)

    parts, optimizer = build(base="sgd")
    optimizer.train()

    def compute_half(rows: slice) -> Tensor:
        loss = 0.5 * nn.functional.cross_entropy(parts.model(parts.x[rows]), parts.y[rows])
        loss.backward()
        return loss

    compute_half(slice(0, 6))
    if last_in_closure:
        optimizer.step(lambda: compute_half(slice(6, 12)))
    else:
        compute_half(slice(6, 12))
        optimizer.step()
    optimizer.eval()
    assert_close(parts.copy_weights(), whole.copy_weights(), 1e-12)


def test_a_sparse_gradient_is_refused_without_a_closure_too() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = MergOPT(model.named_parameters(), base=BASES["sgd"])
    optimizer.train()
    model(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(InputError, match="needs dense gradients, these"):
        optimizer.step()


@pytest.mark.parametrize("make", [strong, partial(WASAM, steps=4, start=0)], ids=["MergOPT", "WASAM"])
def test_modes_reach_the_weights_through_a_stand_in(make) -> None:
    """Lightning hands out an object of a derived class whose attributes live elsewhere."""
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"])
    for _ in range(2):
        optimizer.step(problem.closure)

    class StandIn(type(optimizer)):
        def __init__(self, real: torch.optim.Optimizer) -> None:
            self._real = real

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

    shown = problem.copy_weights()
    StandIn(optimizer).train()
    away = problem.copy_weights()
    assert_differ(away, shown)
    optimizer.train()
    assert_equal_bits(problem.copy_weights(), away)
    StandIn(optimizer).eval()
    assert_equal_bits(problem.copy_weights(), shown)


def test_a_closure_that_fails_in_train_mode_leaves_the_offset_point() -> None:
    problem, optimizer = build()
    optimizer.train()
    away = problem.copy_weights()

    def closure() -> Tensor:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        optimizer.step(closure)
    assert_equal_bits(problem.copy_weights(), away)


def test_a_merge_that_changes_nothing_gives_the_gradient_at_theta() -> None:
    problem = Problem()
    optimizer = MergOPT(problem.model.named_parameters(), BASES["sgd"], coefficients=(1.0,), max_experts=1)
    start = problem.copy_weights()
    optimizer.step(problem.closure)
    assert_equal_bits(problem.weights_seen[0], start)


def test_the_gradient_is_that_of_the_candidate_with_the_largest_loss() -> None:
    chosen = set()
    for seed in range(8):
        problem = Problem()
        optimizer = stronger(problem.model.named_parameters(), BASES["adamw"], worst_of=3, seed=seed)
        returned = optimizer.step(problem.closure)
        *candidates, last = problem.losses
        assert last == max(candidates)
        assert returned == candidates[0]
        worst = candidates.index(last)
        assert_equal_bits(problem.weights_seen[worst], problem.weights_seen[3])
        assert_differ(problem.weights_seen[0], problem.weights_seen[1])

        twin = Problem()
        twin.model.load_state_dict(problem.weights_seen[worst])
        twin.closure()
        gradient = {name: p.grad for name, p in twin.model.named_parameters()}
        plain = Problem()
        reference = BASES["adamw"](plain.model.parameters())
        for name, p in plain.model.named_parameters():
            p.grad = gradient[name]
        reference.step()
        assert_equal_bits(problem.copy_weights(), plain.copy_weights())
        chosen.add(worst)
    assert chosen == {0, 1, 2}


def test_the_first_candidate_is_the_offset_that_one_alone_would_be() -> None:
    one, three = Problem(), Problem()
    stronger(one.model.named_parameters(), BASES["sgd"]).step(one.closure)
    stronger(three.model.named_parameters(), BASES["sgd"], worst_of=3).step(three.closure)
    assert_equal_bits(three.weights_seen[0], one.weights_seen[0])


@pytest.mark.parametrize("convert", [float, lambda loss: loss, lambda loss: loss.reshape(1)])
def test_losses_are_compared_whether_tensors_or_numbers(convert) -> None:
    problem = Problem()
    optimizer = stronger(problem.model.named_parameters(), BASES["sgd"], worst_of=4, seed=2)
    optimizer.step(lambda: convert(problem.closure().detach()))
    assert problem.losses[-1] == max(problem.losses[:-1]) != problem.losses[0]


def test_a_loss_that_is_no_number_counts_as_the_worst() -> None:
    problem = Problem()
    optimizer = stronger(problem.model.named_parameters(), BASES["sgd"], worst_of=4)
    losses = iter([1.0, float("nan"), 2.0, 0.0, 0.0])

    def closure() -> float:
        problem.closure()
        return next(losses)

    optimizer.step(closure)
    assert_equal_bits(problem.weights_seen[1], problem.weights_seen[4])


def test_a_closure_that_returns_no_loss_is_refused_and_leaves_theta() -> None:
    problem = Problem()
    optimizer = stronger(problem.model.named_parameters(), BASES["sgd"], worst_of=2)
    start = problem.copy_weights()
    with pytest.raises(InputError, match=r"worst_of=2\).*NoneType"):
        optimizer.step(lambda: None)
    assert_equal_bits(problem.copy_weights(), start)
    assert optimizer.steps_done == 0


def test_several_candidates_have_no_train_mode() -> None:
    optimizer = stronger(Problem().model.named_parameters(), BASES["sgd"], worst_of=3)
    assert optimizer.evaluations_per_step == 4
    with pytest.raises(InputError, match=r"MergOPT evaluates 4 times.*step\(closure\)"):
        optimizer.train()
    with pytest.raises(InputError, match=r"MergOPT\.step\(\) without a closure"):
        optimizer.step()


def test_a_mean_alone_moves_every_weight_fits() -> None:
    problem = Problem()
    optimizer = MergOPT(problem.model.named_parameters(), BASES["sgd"], (2.0,), 1, loc=0.01, scale=0.0)
    start = problem.copy_weights()
    optimizer.step(problem.closure)
    for name, away in problem.weights_seen[0].items():
        assert torch.allclose(away - start[name], torch.full_like(away, 0.01), atol=1e-15)


def test_one_process_has_rank_zero_whose_offset_is_everybody_s() -> None:
    same, own = Problem(), Problem()
    stronger(same.model.named_parameters(), BASES["sgd"]).step(same.closure)
    stronger(own.model.named_parameters(), BASES["sgd"], per_rank=True).step(own.closure)
    assert_equal_bits(own.copy_weights(), same.copy_weights())


def test_a_step_that_does_not_stay_in_train_mode_ends_at_theta() -> None:
    """For loops that call train() before every forward pass, as the trainer of transformers does."""
    closed, problem = Problem(), Problem()
    reference = stronger(closed.model.named_parameters(), BASES["adamw"])
    optimizer = stronger(problem.model.named_parameters(), BASES["adamw"])
    optimizer.stays_in_train_mode = False

    for _ in range(3):
        reference.step(closed.closure)
        optimizer.zero_grad()
        optimizer.train()
        problem.closure()
        optimizer.step()
        assert not optimizer.theta.held
        assert_equal_bits(problem.copy_weights(), closed.copy_weights())
