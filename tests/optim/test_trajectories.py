"""Whole trajectories in float64, against reference implementations and against loops written out here."""

from pathlib import Path

import pytest
import torch
from golden import select_part
from safetensors.torch import load_file

from mergekit_lab.optim import ASAM, SAM, MergOPT, noise
from mergekit_lab.optim.noise import hash_bits
from optim.problems import BASES, Problem, assert_close, compute_gradients, take_momentum_step

DATA = Path(__file__).parents[1] / "data" / "optim"
TOLERANCE = 1e-12
REFERENCES = {
    "sam_davda54_rho0.05": lambda params, base: SAM(params, base, rho=0.05),
    "asam_samsung_rho0.5_eta0.01": lambda params, base: ASAM(
        params, base, rho=0.5, scaling="samsung", eta=0.01
    ),
    "asam_saft_rho0.5": lambda params, base: ASAM(params, base, rho=0.5, scaling="saft"),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("reference", REFERENCES)
def test_trajectory_equals_the_reference_implementation(reference: str, base: str) -> None:
    golden = load_file(DATA / f"{reference}_{base}_fixed.safetensors")
    inputs = load_file(DATA / "sam_mlp.safetensors")
    problem = Problem()
    problem.model.load_state_dict(select_part(inputs, "init."))
    problem.x, problem.y = inputs["batches.x"][0], inputs["batches.y"][0]
    optimizer = REFERENCES[reference](problem.model.named_parameters(), BASES[base])
    returned = []
    for i in range(1, 6):
        before = problem.copy_weights()
        returned.append(optimizer.step(problem.closure))
        moved = {name: w - before[name] for name, w in problem.weights_seen[-1].items()}
        assert_close(moved, select_part(golden, f"perturb{i}."), TOLERANCE)
        assert_close(problem.copy_weights(), select_part(golden, f"step{i}."), TOLERANCE)
    clean, perturbed = torch.tensor(problem.losses, dtype=torch.float64).view(5, 2).unbind(1)
    losses = {"loss_clean": clean, "loss_perturbed": perturbed}
    assert_close(losses, {name: golden[name] for name in losses}, TOLERANCE)
    assert_close({"loss": torch.stack(returned)}, {"loss": golden["loss_clean"]}, TOLERANCE)


def test_printed_asam_equals_a_dense_loop() -> None:
    problem = Problem()
    optimizer = ASAM(problem.model.named_parameters(), BASES["sgd"], rho=0.05, scaling="printed")
    weights, velocity = problem.copy_weights(), {}
    for _ in range(5):
        g = compute_gradients(problem, weights)
        norm = sum((t**2).sum() for t in g.values()) ** 0.5
        away = {name: w + 0.05 * w**2 * g[name] / norm for name, w in weights.items()}
        take_momentum_step(weights, velocity, compute_gradients(problem, away))
        optimizer.step(problem.closure)
        assert_close(problem.weights_seen[-1], away, TOLERANCE)
        assert_close(problem.copy_weights(), weights, TOLERANCE)


def list_drawn_together(weights: dict[str, torch.Tensor], most: int) -> list[list[str]]:
    """Names of neighbors with at most so many entries in all."""
    groups: list[list[str]] = [[]]
    for name, w in weights.items():
        if groups[-1] and sum(weights[n].numel() for n in groups[-1]) + w.numel() > most:
            groups.append([])
        groups[-1].append(name)
    return groups


@pytest.mark.parametrize("entries_per_draw", [70, 2**24], ids=["many draws", "one draw"])
def test_mergopt_equals_a_dense_loop(entries_per_draw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "ENTRIES_PER_DRAW", entries_per_draw)
    problem = Problem()
    loc, scale, coefficients = 0.01, 0.03, (0.2, 0.45, 0.9)
    optimizer = MergOPT(
        problem.model.named_parameters(),
        BASES["sgd"],
        coefficients,
        max_experts=5,
        loc=loc,
        scale=scale,
        seed=3,
    )
    weights, velocity = problem.copy_weights(), {}
    for step in range(5):
        alpha = coefficients[hash_bits(3, step, "coefficient") % 3]
        experts = hash_bits(3, step, "experts") % 5 + 1
        generator = torch.Generator().manual_seed(hash_bits(3, step, "offset"))
        away = {}
        for names in list_drawn_together(weights, entries_per_draw):
            sizes = [weights[name].numel() for name in names]
            first, second = (
                torch.empty(sum(sizes), dtype=torch.float64).exponential_(1.0, generator=generator)
                for _ in range(2)
            )
            for name, z in zip(names, (loc + scale * (first - second)).split(sizes), strict=True):
                away[name] = weights[name] + (experts * alpha - 1) * z.view(weights[name].shape)
        take_momentum_step(weights, velocity, compute_gradients(problem, away))
        optimizer.step(problem.closure)
        assert_close(problem.weights_seen[-1], away, TOLERANCE)
        assert_close(problem.copy_weights(), weights, TOLERANCE)
