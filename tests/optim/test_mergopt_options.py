"""MergOPT beyond the paper's algorithm: the worst of several offsets, and a mean that is not zero."""

from functools import partial

import pytest
import torch
from torch import nn

from mergekit_lab.errors import InputError
from mergekit_lab.optim import MergOPT
from optim.problems import BASES, Problem, assert_differ, assert_equal_bits

strong = partial(MergOPT, scale=0.3, coefficients=(0.3, 0.7))
FROZEN = partial(torch.optim.SGD, lr=0.0)
UNIT = {"coefficients": (2.0,), "max_experts": 1}


def test_the_gradient_is_that_of_the_candidate_with_the_largest_loss() -> None:
    chosen = set()
    for seed in range(8):
        problem = Problem()
        optimizer = strong(problem.model.named_parameters(), BASES["adamw"], worst_of=3, seed=seed)
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
        assert_equal_bits(problem.weights(), plain.weights())
        chosen.add(worst)
    assert chosen == {0, 1, 2}


def test_the_first_candidate_is_the_offset_that_one_alone_would_be() -> None:
    one, three = Problem(), Problem()
    strong(one.model.named_parameters(), BASES["sgd"]).step(one.closure)
    strong(three.model.named_parameters(), BASES["sgd"], worst_of=3).step(three.closure)
    assert_equal_bits(three.weights_seen[0], one.weights_seen[0])


@pytest.mark.parametrize("convert", [float, lambda loss: loss, lambda loss: loss.reshape(1)])
def test_losses_are_compared_whether_tensors_or_numbers(convert) -> None:
    problem = Problem()
    optimizer = strong(problem.model.named_parameters(), BASES["sgd"], worst_of=4, seed=2)
    optimizer.step(lambda: convert(problem.closure().detach()))
    assert problem.losses[-1] == max(problem.losses[:-1]) != problem.losses[0]


def test_a_loss_that_is_no_number_counts_as_the_worst() -> None:
    problem = Problem()
    optimizer = strong(problem.model.named_parameters(), BASES["sgd"], worst_of=4)
    losses = iter([1.0, float("nan"), 2.0, 0.0, 0.0])

    def closure() -> float:
        problem.closure()
        return next(losses)

    optimizer.step(closure)
    assert_equal_bits(problem.weights_seen[1], problem.weights_seen[4])


def test_a_closure_that_returns_no_loss_is_refused_and_leaves_theta() -> None:
    problem = Problem()
    optimizer = strong(problem.model.named_parameters(), BASES["sgd"], worst_of=2)
    start = problem.weights()
    with pytest.raises(InputError, match=r"worst_of=2\) compares losses, and the closure returned a NoneType"):
        optimizer.step(lambda: None)
    assert_equal_bits(problem.weights(), start)
    assert optimizer.steps_done == 0


def test_several_candidates_have_no_train_mode() -> None:
    optimizer = strong(Problem().model.named_parameters(), BASES["sgd"], worst_of=3)
    assert optimizer.evaluations_per_step == 4
    with pytest.raises(InputError, match=r"MergOPT evaluates 4 times per step.*call step\(closure\)"):
        optimizer.train()
    with pytest.raises(InputError, match=r"MergOPT\.step\(\) without a closure"):
        optimizer.step()


@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
def test_a_mean_that_is_not_zero_shifts_all_weights_by_the_factor(distribution: str) -> None:
    """(Kα − 1) z has mean (Kα − 1) μ."""
    w = nn.Parameter(torch.zeros(100_000))
    for coefficients, experts, factor in (((2.0,), 1, 1.0), ((0.25,), 1, -0.75)):
        optimizer = MergOPT([w], FROZEN, coefficients, experts, loc=0.3, scale=0.1, distribution=distribution)
        optimizer.train()
        assert w.mean().item() == pytest.approx(factor * 0.3, abs=3e-3)
        optimizer.eval()


def test_a_mean_alone_moves_every_weight_fits() -> None:
    problem = Problem()
    optimizer = MergOPT(problem.model.named_parameters(), BASES["sgd"], loc=0.01, scale=0.0, **UNIT)
    start = problem.weights()
    optimizer.step(problem.closure)
    for name, away in problem.weights_seen[0].items():
        assert torch.allclose(away - start[name], torch.full_like(away, 0.01), atol=1e-15)


def test_one_process_has_rank_zero_whose_offset_is_everybody_s() -> None:
    same, own = Problem(), Problem()
    strong(same.model.named_parameters(), BASES["sgd"]).step(same.closure)
    strong(own.model.named_parameters(), BASES["sgd"], per_rank=True).step(own.closure)
    assert_equal_bits(own.weights(), same.weights())


def test_a_step_that_does_not_stay_in_train_mode_ends_at_theta() -> None:
    """For loops that call train() before every forward pass, as the trainer of transformers does."""
    closed, problem = Problem(), Problem()
    reference = strong(closed.model.named_parameters(), BASES["adamw"])
    optimizer = strong(problem.model.named_parameters(), BASES["adamw"])
    optimizer.stays_in_train_mode = False

    for _ in range(3):
        reference.step(closed.closure)
        optimizer.zero_grad()
        optimizer.train()
        problem.closure()
        optimizer.step()
        assert not optimizer.theta.held
        assert_equal_bits(problem.weights(), closed.weights())
