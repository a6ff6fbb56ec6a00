"""Singular triplets and polar factors, fast and to single precision's last digits.

Everything works on a batch of `B` same-shaped matrices, because a GPU factorizes hundreds of them in the time
of a few.

Legend: `B` matrices `m×n`, `r = min(m, n)`, `k` triplets that are asked for.
"""

import math

import torch
from torch import Tensor


def svd(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVD of a batch `[…, m, n]`: `U` `[…, m, r]`, `S` `[…, r]`, `V` `[…, n, r]`, in float64.

    Float64 whatever comes in: single precision is off by up to 1e-4 on the flat spectra of task vectors.
    """
    driver = "gesvd" if matrices.is_cuda else None
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False, driver=driver)
    return u, s, vh.mT


def solve_triplets(matrices: Tensor, rank: int, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` largest singular triplets of a batch `[B, m, n]`, in float64: `U` `[B, m, k]`, `S`, `V`.

    On a CUDA device single-precision matrices go through cuSOLVER's batched `gesvda`, which is thirty times
    faster than one by one and accurate to 1e-7. A matrix with a larger error is solved again by `svd`.
    `overwrite` allows reusing the matrices' memory.
    """
    if not matrices.is_cuda or matrices.dtype == torch.float64:
        return _solve_each(matrices, rank, overwrite)
    if matrices.shape[1] < matrices.shape[2]:
        v, s, u = solve_triplets(matrices.mT, rank)
        return u, s, v
    if matrices.shape[1] > _TALL * matrices.shape[2]:
        return solve_tall_triplets(matrices, rank)
    u, s, v = (torch.cat(x) for x in zip(*(_solve_batch(x, rank) for x in _split_batch(matrices)), strict=True))
    return u, s, v


def _solve_each(matrices: Tensor, rank: int, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Solve by `svd` one matrix at a time, so that all triplets of only one matrix are in memory."""
    batch, m, n = matrices.shape
    u, v = (matrices.new_empty(batch, rank, size, dtype=torch.float64).mT for size in (m, n))
    s = matrices.new_empty(batch, rank, dtype=torch.float64)
    for i, matrix in enumerate(matrices):
        if m < n:
            v[i], s[i], u[i] = solve_one(matrix.mT, rank, overwrite)
        else:
            u[i], s[i], v[i] = solve_one(matrix, rank, overwrite)
    return u, s, v


def solve_one(matrix: Tensor, rank: int, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` largest singular triplets of one matrix `[m, n]`, `m ≥ n`, by LAPACK in float64."""
    triangle = _Triangle(matrix, overwrite)
    u, s, v = svd(triangle.factor)
    return triangle.expand_back(u[:, :rank]), s[:rank], v[:, :rank]


class _Triangle:
    """A matrix `A = Q R` `[m, n]`, `m ≥ n`, of which only `R` is to be factorized, in float64.

    On a CPU `Q` stays reflections, in the memory of a copy of `A` or, if `overwrite` allows it, of `A` itself.
    LAPACK's SVD of `A` would hold two more matrices of that size. Where that does not pay, `R` is `A`.
    """

    def __init__(self, matrix: Tensor, overwrite: bool = False) -> None:
        m, n = matrix.shape
        self._reflections: tuple[Tensor, Tensor] | None = None
        if matrix.is_cuda or m < _UPRIGHT * n or n == 0:
            self.factor = matrix.double()
            return
        columns = matrix.mT.to(torch.float64, memory_format=torch.contiguous_format, copy=not overwrite)
        columns = columns.contiguous().mT
        scales = columns.new_empty(n)
        torch.geqrf(columns, out=(columns, scales))
        self._reflections = columns, scales
        self.factor = columns[:n].triu()

    def expand_back(self, x: Tensor) -> Tensor:
        """`Q x` `[m, k]` for `x` `[n, k]`."""
        if self._reflections is None:
            return x
        columns, scales = self._reflections
        padded = columns.new_zeros(x.shape[1], columns.shape[0]).mT
        padded[: len(x)] = x
        return torch.ormqr(columns, scales, padded, out=padded)


_UPRIGHT = 1.5
"""Rows a column from which a matrix is reduced to its triangle first."""


def _split_batch(matrices: Tensor) -> tuple[Tensor, ...]:
    """Split a batch into parts of about equal size that `gesvda` accepts."""
    batch = len(matrices)
    return matrices.tensor_split(min(batch, -(-batch * matrices.shape[2] // _GESVDA_COLUMNS)))


_TALL = 8
_GESVDA_COLUMNS = 96 * 768
"""Columns of one `gesvda` call over its batch: it refuses much larger ones."""
_ACCURACY = 1e-5
"""Largest residual and departure from orthonormality of triplets that are taken as solved."""


def solve_tall_triplets(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Triplets of matrices with many more rows than columns (vocabularies), by each one's triangular factor."""
    small = torch.stack([torch.linalg.qr(x.double(), mode="r").R for x in matrices])
    _, s, v = solve_triplets(small.to(matrices.dtype), rank)
    inverse = torch.where(s > 0, 1 / s, 0)
    u = torch.stack([x.double() @ (w * i) for x, w, i in zip(matrices, v, inverse, strict=True)])
    return u, s, v


def _solve_batch(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    try:
        u, s, vh = torch.linalg.svd(matrices, full_matrices=False, driver="gesvda")
    except RuntimeError:
        return _solve_each(matrices, rank)
    u, s, v = u[..., :rank].double(), s[..., :rank].double(), vh[..., :rank, :].mT.double()
    residual = (matrices.double() @ v - u * s[:, None]).flatten(1).norm(dim=1)
    eye = torch.eye(rank, dtype=u.dtype, device=u.device)
    skew = torch.maximum((u.mT @ u - eye).abs().amax(dim=(1, 2)), (v.mT @ v - eye).abs().amax(dim=(1, 2)))
    scale = matrices.flatten(1).norm(dim=1).double()
    solved = (residual <= _ACCURACY * scale) & (skew <= _ACCURACY)
    if not bool(solved.all()):
        again = _solve_each(matrices[~solved], rank)
        for target, source in zip((u, s, v), again, strict=True):
            target[~solved] = source
    return u, s, v


def solve_precise_triplets(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """`solve_triplets` where small ones count as much as large ones, of a batch `[B, m, n]` in float64.

    `gesvda` works on squares: a direction whose singular value is a tenth of the largest is off by a hundred
    times single precision. On a CUDA device its directions are the start of a refinement by products in
    float64; matrices for which that does not converge are solved by `svd`.
    """
    if not matrices.is_cuda:
        return _solve_each(matrices, rank)
    if matrices.shape[1] < matrices.shape[2]:
        v, s, u = solve_precise_triplets(matrices.mT, rank)
        return u, s, v
    small = matrices
    if matrices.shape[1] > _TALL * matrices.shape[2]:
        small = torch.stack([torch.linalg.qr(x, mode="r").R for x in matrices])
    parts = [_refine_directions(part, rank) for part in _split_batch(small)]
    v = torch.cat(parts)
    u = matrices @ v
    s = u.norm(dim=1)
    return u * torch.where(s > 0, 1 / s, 0)[:, None], s, v


def _refine_directions(matrices: Tensor, rank: int) -> Tensor:
    gram = matrices.mT @ matrices
    try:
        start = torch.linalg.svd(matrices.float(), full_matrices=False, driver="gesvda").Vh.mT.double()
    except RuntimeError:
        start = torch.zeros_like(gram)
    v, solved = refine_eigenvectors(gram, start, rank)
    v = v[..., :rank]
    if not bool(solved.all()):
        v[~solved] = _solve_each(matrices[~solved], rank)[2]
    return v


def refine_eigenvectors(matrices: Tensor, start: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Refine approximate eigenvectors of symmetric matrices, only by matrix products.

    Ogita & Aishima 2018, "Iterative refinement for symmetric eigenvalue decomposition", Algorithm 1: errors
    are squared in every step. Pairs too close to be told apart are only made orthonormal.

    Args:
        matrices: `[B, n, n]`, float64.
        start: `[B, n, n]`, columns near the eigenvectors, largest eigenvalues first.
        rank: how many of the first are wanted.

    Returns:
        The eigenvectors `[B, n, n]`, and `[B]` true where the first `rank` span what they should, to 1e-9.
    """
    x = start
    eye = torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    for step in range(_REFINEMENTS + 1):
        skew = eye - x.mT @ x
        product = x.mT @ matrices @ x
        values = product.diagonal(dim1=-2, dim2=-1) / (1 - skew.diagonal(dim1=-2, dim2=-1))
        gap = values[:, None, :] - values[:, :, None]
        pull = product + values[:, None, :] * skew
        apart = (gap.abs() > 4 * pull.abs()) & (eye == 0)
        turn = torch.where(apart, pull / gap, skew / 2)
        if step < _REFINEMENTS:
            x = x + x @ turn
    off = torch.where(apart, turn, 1)[:, :rank, rank:].abs().flatten(1)
    worst = torch.cat([off, skew.abs().flatten(1)], dim=1).amax(dim=1)
    return x, worst < 1e-9


_REFINEMENTS = 4


def orthogonalize(matrices: Tensor, precision: torch.dtype, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """The orthonormal factors `U Vᵀ` of `matrices = U S Vᵀ` `[B, m, p]`, and their numerical ranks.

    Directions with `s ≤ tol·s_max` (tol 1e-12 where `precision`, the dtype of the data, is float64; else
    1e-6) have no polar direction: they are left out, which makes the factor a partial isometry. `overwrite`
    gives the matrices' memory away.

    Returns:
        Factors in float64 `[B, m, p]`, ranks `[B]`.
    """
    if matrices.shape[1] < matrices.shape[2]:
        factors, ranks = orthogonalize(matrices.mT, precision, overwrite)
        return factors.mT, ranks
    tolerance = 1e-12 if precision == torch.float64 else 1e-6
    matrices = matrices.double()
    ranks = torch.full(matrices.shape[:1], matrices.shape[2], device=matrices.device)
    if not matrices.is_cuda:
        return _orthogonalize_by_svd(matrices, tolerance, overwrite)
    out, regular = orthogonalize_by_iteration(matrices, max(tolerance, 1e-7))
    if not bool(regular.all()):
        out[~regular], ranks[~regular] = _orthogonalize_by_svd(matrices[~regular], tolerance)
    return out, ranks


def _orthogonalize_by_svd(matrices: Tensor, tolerance: float, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Of `[B, m, p]`, `m ≥ p`, one at a time."""
    out, ranks = torch.empty_like(matrices), matrices.new_empty(len(matrices), dtype=torch.int64)
    for i, matrix in enumerate(matrices):
        triangle = _Triangle(matrix, overwrite)
        u, s, v = svd(triangle.factor)
        keep = s > tolerance * s.amax()
        out[i], ranks[i] = triangle.expand_back(u.mul_(keep) @ v.mT), keep.sum()
    return out, ranks


_STEEP = (3.4445, -4.7750, 2.0315)
"""Odd quintic that lifts small singular values by 3.4 a step, the large staying near 1 (Jordan et al. 2024)."""
_EXACT = (1.875, -1.25, 0.375)
"""Newton–Schulz of order 5: converges cubically to 1."""


def orthogonalize_by_iteration(matrices: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """Polar factors only by matrix products, and whether they can be trusted.

    A steep polynomial lifts the singular values to order 1, as often as the smallest one needs; Newton–Schulz
    then takes them to 1 in full precision.

    Args:
        matrices: `[B, m, p]`, `m ≥ p`, float64.
        smallest: matrices with a singular value below this share of the largest are not solved.

    Returns:
        Factors `[B, m, p]`, and `[B]` true where the factor is orthonormal to rounding.
    """
    gram = matrices.mT @ matrices
    bound = gram.abs().sum(dim=-1).amax(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    x, gram = matrices / bound.sqrt()[:, None, None], gram / bound[:, None, None]
    factor, info = torch.linalg.cholesky_ex(gram)
    least = _estimate_smallest_eigenvalue(factor).sqrt()
    solvable = (info == 0) & (least > smallest)
    lowest = float(least[solvable].min()) if bool(solvable.any()) else 1.0
    steps = max(0, math.ceil(math.log(0.4 / lowest) / math.log(_STEEP[0]))) + 1
    eye = torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    for number in range(steps + _EXACT_STEPS):
        a, b, c = _STEEP if number < steps else _EXACT
        gram = x.mT @ x
        error = (gram - eye).abs().amax(dim=(1, 2))
        if number >= steps + 3 and bool((error[solvable] < _ORTHONORMAL).all()):
            break
        x = x @ (a * eye + b * gram + c * (gram @ gram))
    return x, solvable & (error < _ORTHONORMAL)


_EXACT_STEPS = 10
_ORTHONORMAL = 1e-12


def _estimate_smallest_eigenvalue(cholesky: Tensor) -> Tensor:
    """Of `L Lᵀ`, `[B]`, by inverse iteration: right to a factor of 2 unless the start is unlucky."""
    batch, size = cholesky.shape[:2]
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, size, 1, dtype=torch.float64, generator=generator).to(cholesky.device)
    vector = vector.expand(batch, -1, -1)
    growth = torch.ones(batch, dtype=torch.float64, device=cholesky.device)
    for _ in range(4):
        vector = vector / vector.norm(dim=1, keepdim=True)
        vector = torch.cholesky_solve(vector, cholesky)
        growth = vector.norm(dim=(1, 2))
    return torch.nan_to_num(1 / growth, nan=0.0, posinf=0.0)
