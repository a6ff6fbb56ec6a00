"""The factorizations behind the matrix methods, against dense references."""

import pytest
import torch

from mergekit_lab.merging.factorizations import (
    orthogonalize,
    orthogonalize_by_iteration,
    refine_eigenvectors,
    solve_tall_triplets,
    solve_triplets,
)


def make_ill_conditioned(batch: int, m: int, p: int, smallest: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(batch, m, p, dtype=torch.float64, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(batch, p, p, dtype=torch.float64, generator=generator)).Q
    return u * torch.logspace(0, torch.log10(torch.tensor(smallest)).item(), p, dtype=torch.float64) @ v.mT


@pytest.mark.parametrize("smallest", [0.5, 1e-2, 1e-4, 3e-6])
def test_the_iteration_gives_the_polar_factor_of_an_ill_conditioned_matrix(smallest: float) -> None:
    matrices = make_ill_conditioned(3, 40, 24, smallest)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    polar, regular = orthogonalize_by_iteration(matrices, 1e-7)
    assert bool(regular.all())
    assert float((polar - u @ vh).norm() / (u @ vh).norm()) < 1e-9
    eye = torch.eye(24, dtype=torch.float64)
    assert float((polar.mT @ polar - eye).abs().max()) < 1e-12


def test_the_iteration_says_which_matrices_it_cannot_solve() -> None:
    matrices = make_ill_conditioned(3, 20, 10, 1e-3)
    matrices[1, :, 4] = matrices[1, :, 5]
    matrices[2] = 0
    polar, regular = orthogonalize_by_iteration(matrices, 1e-7)
    assert regular.tolist() == [True, False, False]
    u, _, vh = torch.linalg.svd(matrices[0], full_matrices=False)
    assert float((polar[0] - u @ vh).norm()) < 1e-10


def test_dependent_directions_are_left_out_of_the_polar_factor() -> None:
    matrices = make_ill_conditioned(2, 20, 10, 1e-3)
    matrices[1, :, 4] = matrices[1, :, 5]
    factor, rank = orthogonalize(matrices, torch.float32)
    assert rank.tolist() == [10, 9]
    assert float(factor[1].norm() ** 2) == pytest.approx(9)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_top_triplets_rebuild_the_best_low_rank_approximation(shape: tuple[int, int]) -> None:
    matrices = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    u, s, v = solve_triplets(matrices, 3)
    full_u, full_s, full_vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    wanted = (full_u[..., :3] * full_s[:, None, :3]) @ full_vh[:, :3]
    torch.testing.assert_close((u * s[:, None]) @ v.mT, wanted)


def test_tall_matrices_give_the_same_triplets_through_their_triangular_factor() -> None:
    matrices = torch.randn(2, 90, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    matrices[1] = 0
    u, s, v = solve_tall_triplets(matrices, 3)
    wanted_u, wanted_s, wanted_v = solve_triplets(matrices, 3)
    torch.testing.assert_close(s, wanted_s)
    torch.testing.assert_close((u * s[:, None]) @ v.mT, (wanted_u * wanted_s[:, None]) @ wanted_v.mT)
    assert not u[1].any()


def test_refinement_takes_single_precision_directions_to_double() -> None:
    generator = torch.Generator().manual_seed(0)
    steep = torch.logspace(0, -1.5, 60, dtype=torch.float64)
    matrices = torch.randn(3, 90, 60, dtype=torch.float64, generator=generator) * steep
    gram = matrices.mT @ matrices
    start = torch.linalg.eigh(gram.float()).eigenvectors.flip(-1).double()
    wanted = torch.linalg.svd(matrices, full_matrices=False).Vh[:, :48].mT

    def measure_error(vectors: torch.Tensor) -> float:
        return float((vectors @ vectors.mT - wanted @ wanted.mT).norm())

    vectors, solved = refine_eigenvectors(gram, start, 48)
    assert bool(solved.all())
    assert measure_error(start[..., :48]) > 1e-6
    assert measure_error(vectors[..., :48]) < 1e-10


def test_refinement_says_where_it_has_no_start_and_where_the_cut_is_within_equal_values() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(3, 12, 12, dtype=torch.float64, generator=generator)).Q
    values = torch.arange(12, 0, -1, dtype=torch.float64).repeat(3, 1)
    values[1, 5:8] = 6
    gram = (q * values[:, None]) @ q.mT
    start = q.clone()
    start[2] = 0
    vectors, solved = refine_eigenvectors((gram + gram.mT) / 2, start, 6)
    assert solved.tolist() == [True, False, False]
    assert vectors.shape == (3, 12, 12)
