"""The small problems and the optimizers that these tests share."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mergekit_lab.optim import (
    ASAM,
    PGN,
    RWP,
    SAGM,
    SAM,
    SSAMD,
    SSAMF,
    SWA,
    WASAM,
    FriendlySAM,
    MergOPT,
)

BASES = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sam": SAM,
    "asam-samsung": partial(ASAM, scaling="samsung"),
    "asam-saft": partial(ASAM, scaling="saft"),
    "asam-printed": partial(ASAM, scaling="printed", rho=0.3),
    "mergopt-laplace": partial(MergOPT, scale=0.05, coefficients=(0.3, 0.7)),
    "mergopt-gaussian": partial(MergOPT, scale=0.05, coefficients=(0.3, 0.7), distribution="gaussian"),
    "mergopt-worst": partial(MergOPT, scale=0.05, coefficients=(0.3, 0.7), worst_of=2),
    "friendly-sam": partial(FriendlySAM, sigma=0.5),
    "pgn": PGN,
    "sagm": partial(SAGM, alpha=0.01),
    "ssamf": partial(SSAMF, sparsity=0.2, every=2, rho=0.2),
    "ssamd": partial(SSAMD, steps=6, sparsity=0.2, every=2, rho=0.2),
    "rwp": partial(RWP, gamma=0.05),
    "rwp-mixed": partial(RWP, gamma=0.05, alpha=0.6),
    "swa": partial(SWA, steps=6, start=0),
    "wasam": partial(WASAM, steps=6, start=0),
}

# Those whose gradient is taken away from θ.
MOVING = {name: make for name, make in OPTIMIZERS.items() if name != "swa"}

LIMITS: dict[str, Callable[..., Any]] = {
    "sam": partial(SAM, rho=0),
    "asam-samsung": partial(ASAM, rho=0),
    "asam-saft": partial(ASAM, rho=0, scaling="saft"),
    "asam-printed": partial(ASAM, rho=0, scaling="printed"),
    "mergopt-laplace": partial(MergOPT, scale=0),
    "mergopt-gaussian": partial(MergOPT, scale=0, distribution="gaussian"),
    "mergopt-worst": partial(MergOPT, scale=0, worst_of=3),
    "friendly-sam": partial(FriendlySAM, rho=0),
    "pgn": partial(PGN, rho=0),
    "sagm": partial(SAGM, rho=0, alpha=0),
    "ssamf": partial(SSAMF, rho=0),
    "ssamd": partial(SSAMD, rho=0, steps=6),
    "rwp": partial(RWP, gamma=0),
    "rwp-mixed": partial(RWP, gamma=0, alpha=0.6),
    "swa": partial(SWA, steps=10),
    "wasam": partial(WASAM, rho=0, steps=10),
}


class Net(nn.Module):
    """`scale * fc2(tanh(LayerNorm(fc1(x))))`: matrices, vectors and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.fc2 = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.fc2(torch.tanh(self.norm(self.fc1(x))))


class Problem:
    """A network, a batch, and closures that count and record what they return."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = Net().to(dtype)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + 0.1)
        self.x = torch.randn(12, 8, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randint(4, (12,), generator=generator)
        self.losses: list[float] = []
        self.weights_seen: list[dict[str, Tensor]] = []

    def closure(self) -> Tensor:
        """Forward and backward only: gradients are not zeroed."""
        return self._evaluate(zero=False)

    def run_closure_that_zeroes(self) -> Tensor:
        """Forward, then zero, then backward, which is Lightning's order."""
        return self._evaluate(zero=True)

    def _evaluate(self, zero: bool) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        if zero:
            self.model.zero_grad()
        loss.backward()
        self.losses.append(loss.item())
        self.weights_seen.append(self.copy_weights())
        return loss

    def copy_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def make_required(cls: type) -> dict[str, Any]:
    """Arguments that a class of ours cannot do without, beside parameters and base."""
    parameters = list(inspect.signature(cls).parameters.values())[2:]
    return {p.name: 5 for p in parameters if p.default is p.empty}


def compute_gradients(problem: Problem, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """∂ loss / ∂ weights at `weights`, by torch.func, without touching the model."""

    def compute_loss(w: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(problem.model, w, (problem.x,))
        return nn.functional.cross_entropy(logits, problem.y)

    return torch.func.grad(compute_loss)(weights)


def take_momentum_step(weights: dict[str, Tensor], velocity: dict[str, Tensor], g: dict[str, Tensor]) -> None:
    """One step of `BASES["sgd"]`, written out."""
    for name in weights:
        velocity[name] = 0.9 * velocity.get(name, 0) + g[name]
        weights[name] = weights[name] - 0.1 * velocity[name]


def train(
    make: Callable[..., Any], base: str, steps: int, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """The weights after `steps` steps on a fresh problem."""
    problem = Problem(dtype)
    optimizer = make(problem.model.named_parameters(), base=BASES[base])
    for _ in range(steps):
        optimizer.step(problem.closure)
    return problem.copy_weights()


def assert_equal_bits(weights: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert weights.keys() == wanted.keys()
    for name in wanted:
        assert weights[name].dtype == wanted[name].dtype
        assert torch.equal(weights[name], wanted[name]), name


def assert_differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Every tensor differs somewhere."""
    for name in one:
        assert not torch.equal(one[name], other[name]), name


def assert_close(weights: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """‖weights − wanted‖ ≤ tolerance · ‖wanted‖, tensor by tensor."""
    assert weights.keys() == wanted.keys()
    for name in wanted:
        error = torch.linalg.vector_norm(weights[name] - wanted[name])
        assert error <= tolerance * torch.linalg.vector_norm(wanted[name]), name
