"""Settings of single groups of parameters, groups that maximize, and groups that are refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mergekit_lab.errors import InputError
from mergekit_lab.optim import ASAM, PGN, RWP, SAGM, SAM, SSAMF, SWA, WASAM, FriendlySAM, MergOPT
from optim.problems import (
    BASES,
    OPTIMIZERS,
    Net,
    Problem,
    assert_close,
    assert_equal_bits,
    compute_gradients,
    take_momentum_step,
    train,
)

RADII = (0.01, 0.5)
Weights = dict[str, Tensor]


def make_halves(problem: Problem, **settings: tuple[float, float]) -> list[dict[str, Any]]:
    """Two groups of the problem's parameters, each with its own settings."""
    named = list(problem.model.named_parameters())
    parts = (named[:3], named[3:])
    return [
        {"params": part, **{name: value[i] for name, value in settings.items()}} for i, part in enumerate(parts)
    ]


def map_by_name(problem: Problem, values: tuple[float, float]) -> dict[str, float]:
    return {name: values[i >= 3] for i, name in enumerate(problem.copy_weights())}


def compute_norm(tensors: Weights) -> Tensor:
    return torch.sqrt(sum((t.square().sum() for t in tensors.values()), torch.zeros((), dtype=torch.float64)))


def compute_reference(
    direction: Callable[[Problem, Weights, Weights], Weights],
    mix: Callable[[str, Tensor, Tensor], Tensor] = lambda name, first, second: second,
    steps: int = 20,
) -> Weights:
    """The weights after loops written out: up by `direction`, then SGD with the mixture of both gradients."""
    problem = Problem()
    weights, velocity = problem.copy_weights(), {}
    for _ in range(steps):
        first = compute_gradients(problem, weights)
        shift = direction(problem, weights, first)
        second = compute_gradients(problem, {name: weights[name] + shift[name] for name in weights})
        take_momentum_step(weights, velocity, {name: mix(name, first[name], second[name]) for name in weights})
    return weights


def ascend_the_gradient(problem: Problem, weights: Weights, g: Weights) -> Weights:
    rho = map_by_name(problem, RADII)
    return {name: rho[name] * g[name] / compute_norm(g) for name in g}


def ascend_in_units_of_the_weights(problem: Problem, weights: Weights, g: Weights) -> Weights:
    rho = map_by_name(problem, RADII)
    scaled = {name: weights[name].abs() * g[name] for name in g}
    return {name: rho[name] * weights[name].abs() * scaled[name] / compute_norm(scaled) for name in g}


def ascend_and_return(problem: Problem, weights: Weights, g: Weights) -> Weights:
    rho, alpha = map_by_name(problem, RADII), map_by_name(problem, (0.002, 0.05))
    return {name: (rho[name] / compute_norm(g) - alpha[name]) * g[name] for name in g}


class UpTheBatchsOwnPart:
    """Friendly SAM's direction, with its running mean."""

    def __init__(self) -> None:
        self.mean: Weights = {}

    def __call__(self, problem: Problem, weights: Weights, g: Weights) -> Weights:
        rho, sigma, past = (map_by_name(problem, v) for v in (RADII, (0.3, 0.9), (0.5, 0.8)))
        own = {n: g[n] - sigma[n] * self.mean[n] if self.mean else g[n] for n in g}
        self.mean = {n: past[n] * self.mean[n] + (1 - past[n]) * g[n] if self.mean else g[n] for n in g}
        return {name: rho[name] * own[name] / compute_norm(own) for name in g}


SHARES = map_by_name(Problem(), (0.4, 0.9))


def mix_by_share(name: str, first: Tensor, second: Tensor) -> Tensor:
    return (1 - SHARES[name]) * first + SHARES[name] * second


REFERENCES: dict[str, tuple[Any, dict[str, tuple[float, float]], Callable[[], Weights]]] = {
    "sam": (SAM, {}, lambda: compute_reference(ascend_the_gradient)),
    "asam": (partial(ASAM, scaling="saft"), {}, lambda: compute_reference(ascend_in_units_of_the_weights)),
    "friendly-sam": (
        FriendlySAM,
        {"sigma": (0.3, 0.9), "lmbda": (0.5, 0.8)},
        lambda: compute_reference(UpTheBatchsOwnPart()),
    ),
    "pgn": (PGN, {"alpha": (0.4, 0.9)}, lambda: compute_reference(ascend_the_gradient, mix_by_share)),
    "sagm": (
        SAGM,
        {"alpha": (0.002, 0.05)},
        lambda: compute_reference(ascend_and_return, lambda _, first, second: (first + second) / 2),
    ),
    "ssamf without a mask": (partial(SSAMF, sparsity=0), {}, lambda: compute_reference(ascend_the_gradient)),
    "wasam before its average": (
        partial(WASAM, steps=99, start=1),
        {},
        lambda: compute_reference(ascend_the_gradient),
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_group_s_own_settings_give_the_weights_of_a_loop_written_out(name) -> None:
    make, own, wanted = REFERENCES[name]
    problem = Problem()
    optimizer = make(make_halves(problem, rho=RADII, **own), base=BASES["sgd"])
    for _ in range(20):
        optimizer.step(problem.closure)
    assert_close(problem.copy_weights(), wanted(), 1e-9)


def test_samsung_s_eta_may_differ_between_groups() -> None:
    problem = Problem()
    optimizer = ASAM(make_halves(problem, eta=(0.01, 3.0)), base=BASES["sgd"], rho=0.3)
    start = problem.copy_weights()
    optimizer.step(problem.closure)
    eta, g = map_by_name(problem, (0.01, 3.0)), compute_gradients(problem, start)
    size = {n: w.abs() + eta[n] if "weight" in n else torch.ones_like(w) for n, w in start.items()}
    scaled = {n: size[n] * g[n] for n in g}
    wanted = {n: start[n] + 0.3 * size[n] * scaled[n] / compute_norm(scaled) for n in g}
    assert_close(problem.weights_seen[1], wanted, 1e-12)


@pytest.mark.parametrize("make", [SAM, partial(ASAM, scaling="saft"), FriendlySAM, PGN, SAGM, SSAMF])
def test_a_setting_in_all_groups_is_the_optimizer_s(make) -> None:
    problem = Problem()
    optimizer = make(make_halves(problem, rho=(0.3, 0.3)), base=BASES["adamw"], rho=0.01)
    for _ in range(3):
        optimizer.step(problem.closure)
    assert_equal_bits(problem.copy_weights(), train(partial(make, rho=0.3), "adamw", 3))


def test_a_group_may_ascend_where_the_others_do_not_and_may_change_its_mind() -> None:
    problem = Problem()
    optimizer = SAM(make_halves(problem, rho=(0.0, 0.2)), base=BASES["sgd"], rho=0.0)
    start = problem.copy_weights()
    optimizer.step(problem.closure)
    still = [n for n, w in problem.weights_seen[1].items() if torch.equal(w, start[n])]
    assert still == list(start)[:3]
    optimizer.param_groups[1]["rho"] = 0.0
    optimizer.step(problem.closure)
    assert len(problem.losses) == 3


def test_settings_of_groups_are_saved_and_loaded() -> None:
    saved = SAM(make_halves(Problem(), rho=RADII), base=BASES["sgd"]).state_dict()
    problem = Problem()
    optimizer = SAM(make_halves(problem, rho=(0.0, 0.0)), base=BASES["sgd"])
    optimizer.load_state_dict(saved)
    for _ in range(20):
        optimizer.step(problem.closure)
    assert_close(problem.copy_weights(), compute_reference(ascend_the_gradient), 1e-9)


def test_an_option_that_the_base_has_too_is_the_base_s() -> None:
    problem = Problem()
    base = partial(torch.optim.RMSprop, lr=1e-3)
    optimizer = PGN(make_halves(problem, alpha=(0.9, 0.5)), base=base, alpha=0.0)
    optimizer.step(problem.closure)
    assert len(problem.losses) == 1
    assert [group["alpha"] for group in optimizer.base.param_groups] == [0.9, 0.5]


@pytest.mark.parametrize(
    ("make", "group", "message"),
    [
        (SAM, {"rho": -0.1}, r"rho.*group 1 is -0\.1"),
        (SAM, {"ascent_fraction": 0.5}, r"group 1 .*ascent_fraction.*set rho\)"),
        (partial(SWA, steps=5), {"every": 2}, r"every.*none of its own"),
        (MergOPT, {"scale": 0.1}, r"sets scale"),
        (RWP, {"gamma": 0.1}, r"sets gamma"),
        (SSAMF, {"sparsity": 0.1}, r"sparsity.*set rho\)"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_group_with_a_setting_out_of_range_or_not_its_own_is_refused(make, group, message, late) -> None:
    net = Net()
    first, second = {"params": net.fc1.named_parameters()}, {"params": net.fc2.named_parameters(), **group}
    optimizer = make([first], base=BASES["sgd"])
    with pytest.raises(InputError, match=message):
        optimizer.add_param_group(second) if late else make([first, second], base=BASES["sgd"])


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    problem = Problem()
    optimizer = SAM(problem.model.named_parameters(), base=BASES["sgd"])
    with pytest.raises(InputError):
        optimizer.add_param_group({"params": [("more", nn.Parameter(torch.zeros(2)))], "rho": -1.0})
    optimizer.step(problem.closure)
    assert_equal_bits(problem.copy_weights(), train(SAM, "sgd", 1))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_to_maximize_is_to_minimize_the_negative_bit_for_bit(make, base) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=partial(BASES[base], maximize=True))

    def closure() -> Tensor:
        loss = -nn.functional.cross_entropy(problem.model(problem.x), problem.y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert_equal_bits(problem.copy_weights(), train(make, base, 3))


def test_the_worst_offset_of_groups_that_disagree_about_worse_is_refused() -> None:
    groups = make_halves(Problem(), maximize=(False, True))
    with pytest.raises(InputError, match="worst_of=1"):
        MergOPT(groups, base=BASES["sgd"], worst_of=2)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_parameter_that_is_listed_twice_is_refused_by_name(make) -> None:
    w = nn.Parameter(torch.ones(3))
    for parameters in (
        [("w.weight", w), ("w.weight", w)],
        [("other", w), ("w.weight", w)],
        [{"params": [("w.weight", w)]}, {"params": [("w.weight", w)]}],
    ):
        with pytest.raises(InputError, match=r"listed twice: w\.weight"):
            make(parameters, base=BASES["sgd"])
    optimizer = make([("w.weight", w)], base=BASES["sgd"])
    with pytest.raises(InputError, match=r"optimizer.*w\.weight"):
        optimizer.add_param_group({"params": [("w.weight", w)]})
    assert len(optimizer.param_groups) == 1
