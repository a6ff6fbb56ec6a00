"""Offsets: from seed and step alone, by their distribution, rounded once, in any layout."""

from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from mergekit_lab.optim import MergOPT
from mergekit_lab.optim.noise import Noise, hash_bits

FROZEN = partial(torch.optim.SGD, lr=0.0)
UNIT = {"coefficients": (2.0,), "max_experts": 1}  # Kα − 1 = 1 at every step


def collect_offsets(params: list[Tensor], steps: int, **options) -> list[Tensor]:
    """The first parameter's offset at each step; the weights stay where they are."""
    optimizer = MergOPT(params, base=FROZEN, **options)
    changes = []
    for _ in range(steps):
        theta = params[0].detach().clone()
        optimizer.train()
        changes.append(params[0].detach() - theta)
        optimizer.eval()
        optimizer.step(lambda: None)
    return changes


def test_offset_is_a_function_of_seed_and_step_only() -> None:
    torch.manual_seed(0)
    one = collect_offsets([nn.Parameter(torch.zeros(50))], 4, seed=5, **UNIT)
    torch.manual_seed(1)
    other = collect_offsets([nn.Parameter(torch.zeros(50))], 4, seed=5, **UNIT)
    reseeded = collect_offsets([nn.Parameter(torch.zeros(50))], 4, seed=6, **UNIT)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    distinct = [*one, *reseeded]
    assert len({tuple(z.tolist()) for z in distinct}) == len(distinct)


def test_offset_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    collect_offsets([nn.Parameter(torch.zeros(50))], 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_get_independent_offsets() -> None:
    params = [nn.Parameter(torch.zeros(500)) for _ in range(2)]
    optimizer = MergOPT(params, base=FROZEN, scale=1.0, **UNIT)
    optimizer.train()
    correlation = torch.corrcoef(torch.stack([p.detach() for p in params]))[0, 1]
    assert abs(correlation) < 0.2


def test_coefficient_and_number_of_experts_are_uniform_and_independent() -> None:
    coefficients, steps = (0.15, 0.35, 0.7), 3000
    w = [nn.Parameter(torch.zeros((), dtype=torch.float64))]
    changes = collect_offsets(w, steps, coefficients=coefficients, max_experts=4, loc=1.0, scale=0.0)
    counts = Counter(round(z.item(), 9) for z in changes)
    expected = [round(k * a - 1, 9) for a, k in product(coefficients, range(1, 5))]
    assert counts.keys() == set(expected)
    cells = Counter(expected)
    chi_square = sum((counts[c] - steps * n / 12) ** 2 / (steps * n / 12) for c, n in cells.items())
    assert chi_square < 31.3  # 99.9 % quantile at 11 degrees of freedom


def draw_offsets(distribution: str, dtype: torch.dtype, loc: float = 0.2, scale: float = 0.05) -> Tensor:
    w = [nn.Parameter(torch.zeros(400_000, dtype=dtype))]
    (z,) = collect_offsets(w, 1, distribution=distribution, loc=loc, scale=scale, **UNIT)
    return (z.double() - loc) / scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
def test_noise_has_the_distribution_it_is_named_after(distribution: str, dtype: torch.dtype) -> None:
    z = draw_offsets(distribution, dtype).sort().values
    if distribution == "laplace":
        cdf = torch.where(z < 0, 0.5 * z.exp(), 1 - 0.5 * (-z).exp())
    else:
        cdf = torch.special.ndtr(z)
    empirical = torch.arange(1, len(z) + 1, dtype=torch.float64) / len(z)
    assert (cdf - empirical).abs().max() < 1.95 / len(z) ** 0.5  # Kolmogorov-Smirnov at 0.1 %
    assert abs(z.mean()) < 0.01
    expected = 1.0 if distribution == "laplace" else (2 / torch.pi) ** 0.5
    assert abs(z.abs().mean() - expected) < 0.01


@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
def test_a_negative_scale_negates_the_draws_about_their_mean(distribution: str) -> None:
    def draw(scale: float) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return Noise(distribution, 0.5, scale).draw(9, generator, torch.float64)

    torch.testing.assert_close(draw(-0.25) - 0.5, 0.5 - draw(0.25))
    assert torch.equal(draw(0.0), torch.full((9,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_gets_the_float32_offset_rounded_once_and_reports_what_did_not_move(dtype) -> None:
    theta = torch.linspace(-1, 1, 2000).to(dtype)
    w = nn.Parameter(theta.clone())
    optimizer = MergOPT([w], base=FROZEN, **UNIT)
    assert optimizer.unmoved_fraction is None
    optimizer.train()
    (z,) = collect_offsets([nn.Parameter(torch.zeros(2000))], 1, **UNIT)
    assert torch.equal(w, (theta.float() + z).to(dtype))
    unmoved = (w == theta).double().mean().item()
    assert optimizer.unmoved_fraction == unmoved
    assert 0.02 < unmoved < 0.98
    optimizer.eval()
    assert optimizer.unmoved_fraction == unmoved
    optimizer.step(lambda: None)
    optimizer.train()
    assert optimizer.unmoved_fraction == (w == theta).double().mean().item() != unmoved


def test_unmoved_fraction_counts_low_precision_entries_only() -> None:
    params = [nn.Parameter(torch.full((8,), 300.0, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(99))]
    optimizer = MergOPT(params, base=FROZEN, **UNIT)
    optimizer.train()
    assert optimizer.unmoved_fraction == 1.0
    full = MergOPT([nn.Parameter(torch.zeros(9))], base=FROZEN, **UNIT)
    full.train()
    assert full.unmoved_fraction is None
    for options in ({"coefficients": (1.0,)}, {"scale": 0.0}):
        still = MergOPT(params[:1], base=FROZEN, max_experts=1, **options)
        still.train()
        assert still.unmoved_fraction is None


def test_a_tensor_of_any_memory_layout_is_offset() -> None:
    w = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    flat = nn.Parameter(torch.zeros(2, 3, 4, 5))
    (z,) = collect_offsets([w], 1, **UNIT)
    (wanted,) = collect_offsets([flat], 1, **UNIT)
    assert torch.equal(z, wanted)


def test_hashed_tells_seed_step_and_purpose_apart() -> None:
    values = {hash_bits(*key) for key in product((-1, 1, 11), (0, 1, 11), ("a", "b"))}
    assert len(values) == 18
    assert all(0 <= value < 2**64 for value in values)


@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
def test_a_mean_that_is_not_zero_shifts_all_weights_by_the_factor(distribution: str) -> None:
    """(Kα − 1) z has mean (Kα − 1) μ."""
    w = nn.Parameter(torch.zeros(100_000))
    for coefficients, experts, factor in (((2.0,), 1, 1.0), ((0.25,), 1, -0.75)):
        optimizer = MergOPT([w], FROZEN, coefficients, experts, loc=0.3, scale=0.1, distribution=distribution)
        optimizer.train()
        assert w.mean().item() == pytest.approx(factor * 0.3, abs=3e-3)
        optimizer.eval()
