"""EpiMer's theorems on the shipped methods, in float64 (supplement, B.4)."""

import torch
from merging.conftest import measure_error
from merging.world import assert_close, make_world, run
from torch import Tensor

from mergekit_lab.merging import TSVM, EpiMer, Fisher, TaskArithmetic
from mergekit_lab.merging.contract import Site
from mergekit_lab.merging.spectral import Atoms, whiten_atoms

NAME, RANK, EPSILON = "a.weight", 2, 1e-8


def compute_subspace() -> tuple[dict, dict, dict, Atoms, Tensor, Tensor, Tensor, Tensor]:
    """Base, experts and Fishers; atoms, `S` [m, p], task vectors [T, m], `d` [T, p] and `H` [T, m, m]."""
    base, experts, fishers = make_world(dtype=torch.float64)
    deltas = torch.stack([expert[NAME] - base[NAME] for expert in experts.values()])
    atoms = whiten_atoms(deltas[None], RANK, [Site(tuple(experts), torch.ones(len(experts)))])
    columns = torch.einsum("mp,np->mnp", atoms.u[0], atoms.v[0]).flatten(0, 1)
    owner = torch.arange(len(experts)).repeat_interleave(RANK)
    own = owner == torch.arange(len(experts))[:, None]
    coordinates = torch.where(own, atoms.sigma, 0)
    curvature = torch.stack([torch.diag(f[NAME].double().flatten() + EPSILON) for f in fishers.values()])
    return base, experts, fishers, atoms, columns, deltas.flatten(1), coordinates, curvature


def compute_quadratic(errors: Tensor, curvature: Tensor) -> Tensor:
    """`Σ λ_t e_tᵀ H_t e_t` at `λ_t = 1/T`, for `e` [T, p] and `H` [T, p, p]."""
    return torch.einsum("tp,tpq,tq->", errors, curvature, errors) / len(errors)


def merge_vector(method, base, experts, fishers) -> Tensor:
    return (run(method, base, experts, fishers)[NAME] - base[NAME]).flatten()


def test_the_gain_over_the_flat_mean_is_eta() -> None:
    """Theorem 3."""
    base, experts, fishers, _, columns, _, own, curvature = compute_subspace()
    projected = columns.T @ curvature @ columns
    notes: dict = {}
    method = EpiMer(rank=RANK, aggregator="mean", coefficient=1.0, floor=EPSILON)
    run(method, base, experts, fishers, notes=notes)
    coordinates = columns.T @ merge_vector(method, base, experts, fishers)
    flat = own.mean(dim=0)
    gain = compute_quadratic(flat - own, projected) - compute_quadratic(coordinates - own, projected)
    assert gain > 0
    assert measure_error(gain, torch.tensor(notes[NAME]["eta"], dtype=torch.float64)) < 1e-9


def test_the_merge_is_the_minimum_in_its_subspace() -> None:
    """Theorem 1: no step leads lower."""
    base, experts, fishers, _, columns, _, own, curvature = compute_subspace()
    projected = columns.T @ curvature @ columns
    method = EpiMer(rank=RANK, aggregator="mean", coefficient=1.0, floor=EPSILON)
    coordinates = columns.T @ merge_vector(method, base, experts, fishers)
    least = compute_quadratic(coordinates - own, projected)
    for step in torch.eye(len(coordinates), dtype=torch.float64):
        for sign in (-1e-3, 1e-3):
            assert compute_quadratic(coordinates + sign * step - own, projected) > least


def test_the_error_of_a_merge_is_bounded_by_conflict_and_residual() -> None:
    """Theorem 2: `½(√V + √R)²`, of an exact quadratic loss, with the task vectors projected on all atoms."""
    base, experts, fishers, _, columns, deltas, _, curvature = compute_subspace()
    method = EpiMer(rank=RANK, aggregator="mean", coefficient=1.0, floor=EPSILON, coordinates="full")
    merged = merge_vector(method, base, experts, fishers)
    inside = deltas @ columns
    conflict = compute_quadratic(columns.T @ merged - inside, columns.T @ curvature @ columns)
    residual = compute_quadratic(deltas - inside @ columns.T, curvature)
    loss = compute_quadratic(merged - deltas, curvature) / 2
    assert residual > 0
    assert loss <= (conflict.sqrt() + residual.sqrt()).square() / 2
    assert loss > (conflict.sqrt() - residual.sqrt()).square() / 2


def test_equal_curvature_in_all_directions_is_task_arithmetic() -> None:
    """Proposition 2, case 1: with `S = I` the Fréchet mean of equal curvatures is `Σ λ_t δ_t`."""
    base, experts, fishers, *_ = compute_subspace()
    equal = {name: {n: torch.ones_like(v) for n, v in f.items()} for name, f in fishers.items()}
    assert_close(
        run(Fisher(floor=0.0), base, experts, equal),
        run(TaskArithmetic(coefficient=1 / len(experts)), base, experts, {}),
        1e-12,
    )


def test_a_diagonal_curvature_in_all_directions_is_fisher_averaging() -> None:
    """Case 2, equation 46, from the closed form."""
    base, experts, fishers, _, _, deltas, _, curvature = compute_subspace()
    pull = torch.einsum("tij,tj->i", curvature, deltas)
    wanted = torch.linalg.solve(curvature.sum(dim=0), pull)
    assert measure_error(merge_vector(Fisher(floor=0.0), base, experts, fishers), wanted) < 1e-6


def test_the_whole_curvature_is_what_epimer_solves_in_its_subspace() -> None:
    """Case 3 in EpiMer's subspace: off-diagonal entries that the projection makes count."""
    base, experts, fishers, _, columns, deltas, _, curvature = compute_subspace()
    projected, inside = columns.T @ curvature @ columns, deltas @ columns
    pull = torch.einsum("tpq,tq->p", projected, inside)
    wanted = columns @ torch.linalg.solve(projected.sum(dim=0), pull)
    method = EpiMer(rank=RANK, aggregator="mean", coefficient=1.0, floor=EPSILON, coordinates="full")
    assert measure_error(merge_vector(method, base, experts, fishers), wanted) < 1e-9


def test_equal_curvature_in_the_experts_directions_is_tsvm() -> None:
    """Case 4 with TSV-M's whitening, and the limit that case 5 states."""
    base, experts, fishers, *_ = compute_subspace()
    equal = {name: {n: torch.full_like(v, 0.3) for n, v in f.items()} for name, f in fishers.items()}
    assert_close(run(EpiMer(rank=RANK), base, experts, equal), run(TSVM(rank=RANK), base, experts, {}), 1e-12)
