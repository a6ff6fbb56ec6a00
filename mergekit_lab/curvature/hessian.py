"""The Hessian of a loss through its products with vectors: largest eigenvalues and trace.

- Eigenvalues by Lanczos with full reorthogonalization (Golub & Van Loan, "Matrix computations", chapter 10):
  every new direction is made orthogonal to all earlier ones, twice, so that no copy of a converged eigenvalue
  appears.
- Trace by Hutch++ (Meyer, Musco, Musco & Woodruff 2021, algorithm 1): exact on a sketched subspace,
  Hutchinson's estimator on the rest.

Legend: P entries of all parameters that require gradients, k iterations, m products.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mergekit_lab.batches import Batch, count_samples
from mergekit_lab.curvature.fisher import switch_to_evaluation
from mergekit_lab.curvature.likelihood import compute_logits, log_likelihood
from mergekit_lab.errors import InputError
from mergekit_lab.ranges import check_value

Product = Callable[[Tensor], Tensor]


class Hessian:
    """Products `H v` with the Hessian of the mean negative log-likelihood of samples at a model's weights.

    Args:
        model: as `diagonal_fisher` takes it. Its weights may be changed between products.
        batches: gone through for every product; as `diagonal_fisher` takes them.
        causal: see there.

    Attributes:
        size: P.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], *, causal: bool = False) -> None:
        self._model = model
        self._batches = batches
        self._causal = causal
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise InputError("no parameter requires gradients, so there is no Hessian")
        if isinstance(batches, Iterator):
            raise InputError("the batches are an iterator, which can be read only once: give a list")
        self._samples = sum(count_samples(batch) for batch in batches)
        self.size = sum(p.numel() for p in self._parameters)

    def draw_vector(self, seed: int = 0) -> Tensor:
        """A standard normal vector `[P]`, as the parameters are; the same numbers on any device."""
        first = self._parameters[0]
        drawn = torch.randn(self.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return drawn.to(first)

    def __call__(self, vector: Tensor) -> Tensor:
        """`H v` for `v` `[P]`, in the order of the parameters."""
        parts = vector.split([p.numel() for p in self._parameters])
        shaped = [v.view_as(p) for v, p in zip(parts, self._parameters, strict=True)]
        total = torch.zeros_like(vector)
        with (
            switch_to_evaluation(self._model),
            sdpa_kernel(SDPBackend.MATH),
        ):  # fused kernels have one derivative
            for batch in self._batches:
                with torch.enable_grad():
                    loss = -log_likelihood(*compute_logits(self._model, batch, self._causal)) / self._samples
                    first = torch.autograd.grad(
                        loss, self._parameters, create_graph=True, materialize_grads=True
                    )
                    slope = sum((g * v).sum() for g, v in zip(first, shaped, strict=True))
                    second = torch.autograd.grad(slope, self._parameters, materialize_grads=True)
                total += torch.cat([g.flatten() for g in second])
        return total


@dataclass(frozen=True)
class Eigenvalues:
    """The largest eigenvalues that were found.

    Attributes:
        values: in descending order.
        residuals: `‖H x − λ x‖` of each with its vector: an eigenvalue is no farther than that from λ.
        vectors: `[count, P]`, orthonormal.
        iterations: products that were taken.
        converged: whether every residual is within the tolerance.
    """

    values: list[float]
    residuals: list[float]
    vectors: Tensor
    iterations: int
    converged: bool


@torch.no_grad()
def top_eigenvalues(
    product: Product, start: Tensor, *, count: int = 1, iterations: int = 40, tolerance: float = 1e-3
) -> Eigenvalues:
    """The `count` largest (most positive) eigenvalues of a symmetric operator, by Lanczos.

    Args:
        product: `v ↦ H v` for `v` `[P]`.
        start: a random `[P]`; the result's dtype and device.
        count: how many; at least 1.
        iterations: at most so many products, and vectors of P entries in memory; at least `count`.
        tolerance: stop when every residual is at most this times the largest eigenvalue's magnitude.

    Raises:
        InputError: a number out of range, or a product that is not finite.
    """
    if not 1 <= count <= iterations:
        raise InputError(f"count is {count} and iterations {iterations}; 1 ≤ count ≤ iterations")
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        image = product(basis[-1])
        diagonal.append(float(image @ basis[-1]))
        if not torch.isfinite(image).all():
            raise InputError("a product with the Hessian is not finite: is the loss finite at these weights?")
        for _ in range(2):
            for direction in basis:
                image = image - (image @ direction) * direction  # a product may hand back its own input
        norm = float(image.norm())
        values, vectors = _solve_tridiagonal(diagonal, beside)
        residuals = (norm * vectors[-1].abs())[:count]
        scale = float(values.abs().max())
        spent = norm <= torch.finfo(start.dtype).eps * max(scale, 1e-30) * len(start) ** 0.5
        enough = len(diagonal) >= count and bool((residuals <= tolerance * scale).all())
        if spent or enough or len(diagonal) == min(iterations, len(start)):
            break
        beside.append(norm)
        basis.append(image / norm)
    ritz = vectors[:, :count].T.to(start) @ torch.stack(basis)
    kept = [float(v) for v in values[:count]]
    return Eigenvalues(kept, [float(r) for r in residuals], ritz, len(diagonal), bool(spent or enough))


def _solve_tridiagonal(diagonal: Sequence[float], beside: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Eigenvalues in descending order and eigenvectors in columns, of Lanczos' matrix."""
    middle, off = (torch.tensor(list(x), dtype=torch.float64) for x in (diagonal, beside))
    matrix = torch.diag(middle) + (torch.diag(off, 1) + torch.diag(off, -1))
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(0), vectors.flip(1)


@dataclass(frozen=True)
class Trace:
    """An estimate of a trace.

    Attributes:
        value: unbiased.
        standard_error: of the part that was estimated by random vectors; 0 where nothing was left to estimate.
        products: that were taken.
    """

    value: float
    standard_error: float
    products: int


@torch.no_grad()
def trace(product: Product, like: Tensor, *, products: int = 30, seed: int = 0) -> Trace:
    """The trace of a symmetric operator by Hutch++.

    Args:
        product: `v ↦ A v` for `v` `[P]`.
        like: any `[P]`, for dtype and device.
        products: m, at least 6, so that there is an error to estimate; `2m/3` vectors of P entries are held.
        seed: of the random signs.

    Raises:
        InputError: fewer than 6 products.
    """
    check_value(products, Annotated[int, Ge(6)], "products")
    third = products // 3
    generator = torch.Generator().manual_seed(seed)

    def draw_signs(count: int) -> Tensor:
        drawn = torch.randint(0, 2, (count, len(like)), generator=generator, dtype=torch.int8)
        return (2 * drawn - 1).to(like)

    sketch = torch.stack([product(s) for s in draw_signs(third)])
    basis = torch.linalg.qr(sketch.T)[0]
    exact = sum(float(q @ product(q)) for q in basis.T)
    rest = draw_signs(third)
    rest = rest - (rest @ basis) @ basis.T
    estimates = torch.tensor([float(g @ product(g)) for g in rest], dtype=torch.float64)
    products = 2 * third + basis.shape[1]
    return Trace(exact + float(estimates.mean()), float(estimates.std() / third**0.5), products)
