"""The flat-minima methods against loops written out here, their limits, and what masks must be."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mergekit_lab.errors import InputError
from mergekit_lab.optim import PGN, RWP, SAGM, SAM, SSAMD, SSAMF, FriendlySAM
from mergekit_lab.optim.noise import hash_bits
from mergekit_lab.optim.rwp import filter_norms
from mergekit_lab.optim.ssam import exchange, select_largest
from optim.problems import (
    BASES,
    Problem,
    assert_close,
    assert_differ,
    assert_equal_bits,
    compute_gradients,
    take_momentum_step,
    train,
)

TOLERANCE = 1e-12
Weights = dict[str, Tensor]


def compute_norm(g: Weights) -> Tensor:
    return sum((t**2).sum() for t in g.values()) ** 0.5


def compute_length(rho: float, direction: Weights) -> Tensor:
    """What makes `direction` as long as ρ, with the addition that keeps a zero one finite."""
    return rho / (compute_norm(direction) + 1e-12)


def ascend(weights: Weights, direction: Weights, factor: Tensor) -> Weights:
    return {name: w + factor * direction[name] for name, w in weights.items()}


def flatten(tensors: Weights) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def split_like(values: Tensor, like: Weights) -> Weights:
    parts = values.split([t.numel() for t in like.values()])
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}


def test_friendly_sam_equals_a_dense_loop() -> None:
    problem = Problem()
    optimizer = FriendlySAM(problem.model.named_parameters(), BASES["sgd"], rho=0.1, sigma=0.7, lmbda=0.6)
    weights, velocity, mean = problem.copy_weights(), {}, {}
    for _ in range(5):
        g = compute_gradients(problem, weights)
        d = {name: g[name] - 0.7 * mean[name] if mean else g[name] for name in g}
        mean = {name: 0.6 * mean[name] + 0.4 * g[name] if mean else g[name] for name in g}
        away = ascend(weights, d, compute_length(0.1, d))
        take_momentum_step(weights, velocity, compute_gradients(problem, away))
        optimizer.step(problem.closure)
        assert_close(problem.weights_seen[-1], away, TOLERANCE)
        assert_close(problem.copy_weights(), weights, TOLERANCE)


def test_pgn_equals_a_dense_loop() -> None:
    problem = Problem()
    optimizer = PGN(problem.model.named_parameters(), BASES["sgd"], rho=0.1, alpha=0.7)
    weights, velocity = problem.copy_weights(), {}
    for _ in range(5):
        g = compute_gradients(problem, weights)
        away = ascend(weights, g, compute_length(0.1, g))
        second = compute_gradients(problem, away)
        take_momentum_step(weights, velocity, {name: 0.3 * g[name] + 0.7 * second[name] for name in g})
        optimizer.step(problem.closure)
        assert_close(problem.weights_seen[-1], away, TOLERANCE)
        assert_close(problem.copy_weights(), weights, TOLERANCE)


def test_pgn_follows_the_gradient_of_the_loss_plus_lambda_times_the_norm_of_its_gradient() -> None:
    """Against the definition: the Hessian-vector product that the two evaluations stand for."""
    problem = Problem()
    alpha, r = 0.8, 1e-5
    weights = problem.copy_weights()

    def compute_penalized(w: Weights) -> Tensor:
        logits = torch.func.functional_call(problem.model, w, (problem.x,))
        return nn.functional.cross_entropy(logits, problem.y) + alpha * r * compute_norm(
            compute_gradients(problem, w)
        )

    wanted = torch.func.grad(compute_penalized)(weights)
    plain = compute_gradients(problem, weights)
    optimizer = PGN(problem.model.named_parameters(), partial(torch.optim.SGD, lr=1.0), rho=r, alpha=alpha)
    optimizer.step(problem.closure)
    penalty = {name: (weights[name] - w - plain[name]) / r for name, w in problem.copy_weights().items()}
    assert_close(penalty, {name: (wanted[name] - plain[name]) / r for name in wanted}, 1e-3)


def test_sagm_equals_a_dense_loop() -> None:
    problem = Problem()
    optimizer = SAGM(problem.model.named_parameters(), BASES["sgd"], rho=0.1, alpha=0.03)
    weights, velocity = problem.copy_weights(), {}
    for _ in range(5):
        g = compute_gradients(problem, weights)
        away = ascend(weights, g, compute_length(0.1, g) - 0.03)
        second = compute_gradients(problem, away)
        take_momentum_step(weights, velocity, {name: (g[name] + second[name]) / 2 for name in g})
        optimizer.step(problem.closure)
        assert_close(problem.weights_seen[-1], away, TOLERANCE)
        assert_close(problem.copy_weights(), weights, TOLERANCE)


def test_ssamf_equals_a_dense_loop() -> None:
    problem = Problem()
    optimizer = SSAMF(problem.model.named_parameters(), BASES["sgd"], rho=0.1, sparsity=0.6, every=2)
    weights, velocity = problem.copy_weights(), {}
    total = torch.zeros_like(flatten(weights))
    for step in range(5):
        g = compute_gradients(problem, weights)
        total += flatten(g) ** 2
        if step % 2 == 0:
            chosen = total.topk(int(len(total) * 0.4)).indices
            mask = split_like(torch.zeros_like(total).index_fill(0, chosen, 1), weights)
            total = torch.zeros_like(total)
        away = ascend(weights, {name: g[name] * mask[name] for name in g}, compute_length(0.1, g))
        take_momentum_step(weights, velocity, compute_gradients(problem, away))
        optimizer.step(problem.closure)
        assert_close(problem.weights_seen[-1], away, TOLERANCE)
        assert_close(problem.copy_weights(), weights, TOLERANCE)


def test_ssamd_equals_a_dense_loop() -> None:
    problem = Problem()
    steps, sparsity, seed = 5, 0.6, 3
    optimizer = SSAMD(
        problem.model.named_parameters(),
        BASES["sgd"],
        steps,
        rho=0.1,
        sparsity=sparsity,
        drop_rate=0.5,
        every=2,
        seed=seed,
    )
    weights, velocity = problem.copy_weights(), {}
    count = len(flatten(weights))
    live = count - math.ceil(count * sparsity)

    def draw(step: int, what: str) -> Tensor:
        generator = torch.Generator().manual_seed(hash_bits(seed, step, what))
        return torch.empty(count).normal_(generator=generator)

    mask = torch.zeros(count, dtype=torch.bool)
    mask[draw(0, "mask").topk(live).indices] = True
    for step in range(steps):
        g = compute_gradients(problem, weights)
        shown = split_like(mask.double(), weights)
        away = ascend(weights, {name: g[name] * shown[name] for name in g}, compute_length(0.1, g))
        if step % 2 == 0:
            going = int(live * 0.25 * (1 + math.cos(math.pi * step / steps)))
            smallest = flatten(g).abs().masked_fill(~mask, math.inf).topk(going, largest=False).indices
            luckiest = draw(step, "growth").masked_fill(mask, -math.inf).topk(going).indices
            mask = mask.index_fill(0, smallest, False).index_fill(0, luckiest, True)
            assert int(mask.sum()) == live
        take_momentum_step(weights, velocity, compute_gradients(problem, away))
        optimizer.step(problem.closure)
        assert_close(problem.weights_seen[-1], away, TOLERANCE)
        assert_close(problem.copy_weights(), weights, TOLERANCE)


@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_rwp_equals_a_dense_loop(alpha: float) -> None:
    problem = Problem()
    optimizer = RWP(problem.model.named_parameters(), BASES["sgd"], gamma=0.03, alpha=alpha, seed=4)
    weights, velocity = problem.copy_weights(), {}
    for step in range(5):
        generator = torch.Generator().manual_seed(hash_bits(4, step, "offset"))
        z = torch.empty(len(flatten(weights)), dtype=torch.float64).normal_(generator=generator)
        away = {}
        for name, part in split_like(z, weights).items():
            w = weights[name]
            size = w.flatten(1).norm(dim=1, keepdim=True) if w.ndim > 1 else w.flatten().norm()
            away[name] = w + 0.03 * size * part
        g, second = compute_gradients(problem, weights), compute_gradients(problem, away)
        take_momentum_step(weights, velocity, {n: (1 - alpha) * g[n] + alpha * second[n] for n in g})
        optimizer.step(problem.closure)
        assert_close(problem.weights_seen[-1], away, TOLERANCE)
        assert_close(problem.copy_weights(), weights, TOLERANCE)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    "make",
    [
        partial(FriendlySAM, sigma=0),
        partial(PGN, alpha=1),
        partial(SSAMF, sparsity=0),
        partial(SSAMD, sparsity=0, steps=4, every=1),
    ],
    ids=["friendly-sam", "pgn", "ssamf", "ssamd"],
)
def test_without_what_it_adds_it_is_sam_bit_for_bit(make, base) -> None:
    assert_equal_bits(train(partial(make, rho=0.1), base, 4), train(partial(SAM, rho=0.1), base, 4))


@pytest.mark.parametrize(
    "make",
    [
        partial(PGN, alpha=0),
        partial(RWP, alpha=0),
        partial(SSAMF, sparsity=1),
        partial(SSAMD, sparsity=1, steps=4, every=1),
    ],
    ids=["pgn", "rwp", "ssamf", "ssamd"],
)
def test_with_nothing_left_of_it_it_is_the_base_bit_for_bit(make) -> None:
    plain = Problem()
    reference = BASES["adamw"](plain.model.parameters())
    for _ in range(4):
        reference.step(plain.run_closure_that_zeroes)
    assert_equal_bits(train(make, "adamw", 4), plain.copy_weights())


def test_largest_takes_exactly_so_many_and_of_equal_ones_the_first() -> None:
    scores = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0])
    wanted = {0: [], 1: [1], 2: [1, 3], 3: [0, 1, 3], 4: [0, 1, 2, 3], 5: [0, 1, 2, 3, 4]}
    for count, indices in wanted.items():
        assert select_largest(scores, count).nonzero().flatten().tolist() == indices


def test_a_mask_exchanges_no_more_than_there_is() -> None:
    mask = torch.tensor([True, True, True, False])
    sizes = torch.tensor([3.0, 1.0, 2.0, 9.0])
    luck = torch.tensor([9.0, 9.0, 9.0, 0.0])
    assert exchange(mask, sizes, luck, 1.0).tolist() == [True, False, True, True]
    assert exchange(mask, sizes, luck, 0.0).tolist() == mask.tolist()
    everything = torch.ones(4, dtype=torch.bool)
    assert exchange(everything, sizes, luck, 1.0).all()


def test_a_given_fisher_chooses_the_mask_and_is_kept_over_a_checkpoint() -> None:
    problem = Problem()
    optimizer = SSAMF(problem.model.named_parameters(), BASES["sgd"], sparsity=0.5, every=1)
    fisher = {
        name: torch.full_like(w, float(name == "fc1.weight")) for name, w in problem.copy_weights().items()
    }
    optimizer.use_fisher({**fisher, "head": torch.ones(3)})
    twin = SSAMF(problem.model.named_parameters(), BASES["sgd"])
    twin.load_state_dict(optimizer.state_dict())
    for chosen in (optimizer, twin):
        start = problem.copy_weights()
        chosen.step(problem.closure)
        moved = {name: not torch.equal(w, start[name]) for name, w in problem.weights_seen[-1].items()}
        assert moved["fc1.weight"]
        assert not moved["fc2.weight"]
    assert twin.external_fisher


def test_a_fisher_that_does_not_fit_is_refused() -> None:
    problem = Problem()
    fisher = {name: torch.zeros_like(w) for name, w in problem.copy_weights().items()}
    fisher["scale"] = torch.zeros(2)
    del fisher["fc2.bias"]
    optimizer = SSAMF(problem.model.named_parameters(), BASES["sgd"])
    with pytest.raises(InputError, match=r"fc2\.bias, scale"):
        optimizer.use_fisher(fisher)
    unnamed = SSAMF(problem.model.parameters(), BASES["sgd"])
    with pytest.raises(InputError, match=r"SSAMF.*model\.named_parameters\(\)"):
        unnamed.use_fisher(fisher)


def test_a_filter_is_what_belongs_to_one_output() -> None:
    kernel = torch.randn(3, 2, 4, 4)
    assert torch.allclose(filter_norms(kernel).flatten(), kernel.flatten(1).norm(dim=1))
    assert filter_norms(kernel).shape == (3, 1, 1, 1)
    assert filter_norms(torch.tensor([3.0, 4.0])) == 5
    assert filter_norms(torch.tensor(-2.0)) == 2
    assert filter_norms(torch.ones(2, 2, dtype=torch.float16)).dtype is torch.float32


def test_rwp_with_and_without_closure_give_the_same_weights() -> None:
    closed, open_loop = Problem(), Problem()
    optimizer = RWP(closed.model.named_parameters(), base=BASES["adamw"], gamma=0.05)
    for _ in range(4):
        optimizer.step(closed.closure)
    optimizer = RWP(open_loop.model.named_parameters(), base=BASES["adamw"], gamma=0.05)
    optimizer.train()
    for _ in range(4):
        optimizer.zero_grad()
        open_loop.closure()
        optimizer.step()
    assert_differ(open_loop.copy_weights(), closed.copy_weights())
    optimizer.eval()
    assert_equal_bits(open_loop.copy_weights(), closed.copy_weights())


@pytest.mark.parametrize("make", [partial(RWP, alpha=0.5)], ids=["rwp"])
def test_two_evaluations_have_no_train_mode(make) -> None:
    optimizer = make(Problem().model.named_parameters(), base=BASES["sgd"])
    with pytest.raises(InputError, match=r"RWP evaluates 2 times.*step\(closure\)"):
        optimizer.train()
