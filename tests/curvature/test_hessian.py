"""Products, eigenvalues and trace against dense Hessians in float64."""

import pytest
import torch
from curvature.models import CASES, Case, draw_noise
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from mergekit_lab import InputError
from mergekit_lab.batches import count_samples
from mergekit_lab.curvature import Hessian, top_eigenvalues, trace
from mergekit_lab.curvature.likelihood import compute_logits, log_likelihood


def make_mlp() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    return Case(model, (draw_noise(12, 4).double(), torch.arange(12) % 3))


def compute_dense(case: Case) -> Tensor:
    named = {n: p.detach() for n, p in case.model.named_parameters() if p.requires_grad}
    case.model.eval()

    def compute_loss(flat: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in named.values()])
        weights = {n: v.view_as(p) for (n, p), v in zip(named.items(), parts, strict=True)}

        class ModelAtWeights(nn.Module):
            def forward(self, *args, **kwargs):
                return functional_call(case.model, weights, args, kwargs)

        return -log_likelihood(*compute_logits(ModelAtWeights(), case.batch, case.causal)) / count_samples(
            case.batch
        )

    with sdpa_kernel(SDPBackend.MATH):
        return hessian(compute_loss, torch.cat([p.flatten() for p in named.values()]), vectorize=True)


def select(case: Case, *kept: str) -> Case:
    """The case in float64 with few parameters left to differentiate."""
    case.model.double()
    for name, p in case.model.named_parameters():
        p.requires_grad_(any(part in name for part in kept))
    return case


def make_vit() -> Case:
    case = select(CASES["open_clip ViT"](), "class_embedding", "attn.in_proj_bias", "ln_post")
    images, labels = case.batch
    return Case(case.model, (images.double(), labels))


def make_llama() -> Case:
    return select(CASES["Llama"](), "norm.weight", "layers.1.self_attn.k_proj")


@pytest.mark.parametrize(("make", "tolerance"), [(make_mlp, 1e-9), (make_vit, 1e-9), (make_llama, 1e-5)])
def test_products_eigenvalues_and_trace_are_the_dense_hessians(make, tolerance: float) -> None:
    """Hugging Face's norms compute in float32 whatever the weights are."""
    case = make()
    matrix = compute_dense(case)
    wanted = torch.linalg.eigvalsh(matrix).flip(0)
    scale = float(wanted.abs().max())
    product = Hessian(case.model, [case.batch], causal=case.causal)
    v = product.draw_vector(3)
    assert float((product(v) - matrix @ v).norm()) < tolerance * scale * float(v.norm())
    pairs = top_eigenvalues(
        product, product.draw_vector(), count=3, iterations=product.size, tolerance=tolerance
    )
    assert pairs.converged
    assert pairs.values == pytest.approx(wanted[:3].tolist(), abs=10 * tolerance * scale)
    for value, vector in zip(pairs.values, pairs.vectors, strict=True):
        assert float((matrix @ vector - value * vector).norm()) < 10 * tolerance * scale
    estimate = trace(product, v, products=60)
    spread = 4 * estimate.standard_error + tolerance * scale
    assert estimate.value == pytest.approx(float(matrix.trace()), abs=spread)


def test_batches_are_one_data_set_and_dropout_is_off() -> None:
    case = make_mlp()
    (x, y), v = case.batch, Hessian(case.model, [case.batch]).draw_vector()
    case.model.train()
    whole = Hessian(case.model, [(x, y)])(v)
    parts = Hessian(case.model, [(x[:5], y[:5]), (x[5:], y[5:])])(v)
    torch.testing.assert_close(parts, whole)
    assert case.model.training


def make_symmetric(values: list[float], seed: int = 0) -> Tensor:
    size = len(values)
    q = torch.linalg.qr(draw_noise(size, size, seed=seed).double())[0]
    return q * torch.tensor(values, dtype=torch.float64) @ q.T


def test_eigenvalues_close_together_are_all_found_once() -> None:
    """Without reorthogonalization a converged value comes back as a ghost of itself."""
    values = [10.0, 9.999, 9.5, *torch.linspace(-3, 3, 57).tolist()]
    matrix = make_symmetric(values)
    pairs = top_eigenvalues(
        lambda v: matrix @ v, torch.ones(60).double(), count=3, iterations=60, tolerance=1e-9
    )
    assert pairs.values == pytest.approx([10.0, 9.999, 9.5], abs=1e-6)
    gram = pairs.vectors @ pairs.vectors.T
    torch.testing.assert_close(gram, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-8)


def test_the_largest_is_the_most_positive_not_the_largest_in_magnitude() -> None:
    matrix = make_symmetric([-50.0, 2.0, 1.0, 0.5])
    pairs = top_eigenvalues(lambda v: matrix @ v, torch.ones(4).double(), iterations=4, tolerance=1e-9)
    assert pairs.values == pytest.approx([2.0])


def test_too_few_iterations_are_reported_and_the_residual_bounds_the_error() -> None:
    matrix = make_symmetric(torch.linspace(0, 1, 80).tolist())
    pairs = top_eigenvalues(lambda v: matrix @ v, torch.randn(80).double(), iterations=8, tolerance=1e-8)
    assert not pairs.converged
    assert pairs.iterations == 8
    nearest = (torch.linalg.eigvalsh(matrix) - pairs.values[0]).abs().min()
    assert float(nearest) <= pairs.residuals[0]


def test_a_start_inside_an_invariant_space_ends_early() -> None:
    for factor, product in ((3.0, lambda v: 3 * v), (1.0, lambda v: v)):
        pairs = top_eigenvalues(product, torch.ones(9).double(), iterations=5)
        assert (pairs.values, pairs.iterations, pairs.converged) == ([pytest.approx(factor)], 1, True)
        assert float(pairs.vectors.norm()) == pytest.approx(1.0)


def test_hutch_plus_plus_is_exact_for_low_rank_and_unbiased_otherwise() -> None:
    low = make_symmetric([5.0, -2.0, 1.0, *[0.0] * 37])
    like = torch.zeros(40, dtype=torch.float64)
    exact = trace(lambda v: low @ v, like, products=12)
    assert exact.value == pytest.approx(4.0, abs=1e-9)
    assert exact.standard_error < 1e-9
    full = make_symmetric(torch.linspace(-1, 2, 40).tolist())
    values = [trace(lambda v: full @ v, like, products=12, seed=s) for s in range(60)]
    mean = sum(t.value for t in values) / 60
    spread = torch.tensor([t.value for t in values]).std() / 60**0.5
    assert mean == pytest.approx(20.0, abs=4 * float(spread))
    assert all(t.products == 12 for t in values)


def test_products_with_fewer_entries_than_a_sketch_are_counted() -> None:
    seen = []
    estimate = trace(lambda v: seen.append(v) or 3 * v, torch.zeros(2), products=30)
    assert estimate.products == len(seen) == 22


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="count is 3 and iterations 2"):
        top_eigenvalues(lambda v: v, torch.ones(4), count=3, iterations=2)
    with pytest.raises(InputError, match="products is 5"):
        trace(lambda v: v, torch.ones(4), products=5)
    with pytest.raises(InputError, match="not finite"):
        top_eigenvalues(lambda v: v / 0, torch.ones(4))
    with pytest.raises(InputError, match="no parameter requires gradients"):
        Hessian(nn.ReLU(), [])
    with pytest.raises(InputError, match="only once"):
        Hessian(nn.Linear(2, 2), iter([(torch.ones(1, 2), torch.zeros(1).long())]))
