"""Fitting offsets to task vectors: against direct computations on the sorted entries, and what is refused."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mergekit_lab.errors import InputError
from mergekit_lab.optim import MergOPT, OffsetFit, fit_offset
from optim.problems import BASES, Net

UNIT = {"coefficients": (2.0,), "max_experts": 1}


def draw_laplace(count: int, loc: float, scale: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    u = torch.empty(count, dtype=torch.float64).uniform_(-1, 1, generator=generator)
    return (loc - scale * u.sign() * torch.log(1 - u.abs())).float()


def fit_directly(values: Tensor, distribution: str) -> OffsetFit:
    """The definitions, in float64 over the sorted entries."""
    x = values.double().sort().values
    n = len(x)
    if distribution == "laplace":
        loc = x[(n - 1) // 2]
        scale = (x - loc).abs().mean()
        z = (x - loc) / scale
        cdf = torch.where(z < 0, 0.5 * z.exp(), 1 - 0.5 * (-z).exp())
        likelihood = (-torch.log(2 * scale) - z.abs()).mean()
    else:
        loc, scale = x.mean(), x.std(correction=0)
        z = (x - loc) / scale
        cdf = torch.special.ndtr(z)
        likelihood = (-0.5 * math.log(2 * math.pi) - torch.log(scale) - z.square() / 2).mean()
    # at equal values the empirical function jumps once, over all of them
    reached = torch.searchsorted(x, x, right=True) / n
    left = torch.searchsorted(x, x, right=False) / n
    distance = torch.maximum((cdf - reached).abs(), (cdf - left).abs()).max()
    return OffsetFit(float(loc), float(scale), distribution, float(distance), float(likelihood), n)


VALUES = {
    "laplace": draw_laplace(30_001, 2e-5, 5e-4),
    "an even number": draw_laplace(10_000, 0.0, 1e-3),
    "gaussian": torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 0.01,
    "far from zero": draw_laplace(5_000, -0.3, 0.05),
    "bfloat16": draw_laplace(5_000, 0.0, 1e-3).bfloat16().float(),
    "half of them zero": torch.cat([draw_laplace(4_000, 0.0, 1e-3), torch.zeros(4_000), -torch.zeros(50)]),
    "three": torch.tensor([0.5, -1.0, 2.0]),
    "one sided": draw_laplace(1_000, 0.0, 1.0).abs(),
}


@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_the_fit_is_that_of_the_sorted_entries(values: Tensor, distribution: str) -> None:
    fit, wanted = fit_offset([values], distribution), fit_directly(values, distribution)
    if distribution == "laplace":
        assert fit.loc == wanted.loc
    assert fit.loc == pytest.approx(wanted.loc, rel=1e-9, abs=1e-12)
    assert fit.scale == pytest.approx(wanted.scale, rel=1e-9)
    assert fit.mean_log_likelihood == pytest.approx(wanted.mean_log_likelihood, rel=1e-9)
    assert fit.ks_distance == pytest.approx(wanted.ks_distance, abs=1e-3 if values.mean() < -0.2 else 4e-5)
    assert fit.entries == len(values)


def test_a_laplace_is_recovered_and_told_from_a_gaussian() -> None:
    values = draw_laplace(200_000, 1e-4, 5e-4)
    fit = fit_offset([values])
    assert fit.loc == pytest.approx(1e-4, abs=5e-6)
    assert fit.scale == pytest.approx(5e-4, rel=0.01)
    assert fit.ks_distance < 0.005
    other = fit_offset([values], "gaussian")
    assert other.ks_distance > 0.05
    assert other.mean_log_likelihood < fit.mean_log_likelihood


def test_how_the_entries_are_split_into_tensors_does_not_matter() -> None:
    values = VALUES["laplace"]
    whole = fit_offset([values])
    first, second, third = values[:6].view(2, 3), values[6], values[7:]
    counts = torch.arange(3)
    for deltas in (
        {"a": first, "b": second, "c": third, "steps": counts},
        [{"a": first}, {"a": second, "b": third}],
        {"svhn": {"a": first}, "mnist": [second, third]},
        (third, second, first),
    ):
        fit = fit_offset(deltas)
        assert (fit.loc, fit.entries) == (whole.loc, whole.entries)
        assert fit.scale == pytest.approx(whole.scale, rel=1e-9)
        assert fit.ks_distance == whole.ks_distance


def test_equal_entries_have_no_width() -> None:
    for distribution in ("laplace", "gaussian"):
        fit = fit_offset([torch.full((7,), 0.25)], distribution)
        assert (fit.loc, fit.scale, fit.ks_distance) == (0.25, 0.0, 0.0)
        assert fit.mean_log_likelihood == math.inf


def test_what_cannot_be_fitted_is_refused() -> None:
    cases = [
        ([], r"no entries to fit"),
        ([torch.arange(3)], r"no entries to fit"),
        ((t for t in [torch.ones(2)]), r"not a generator: they are read several times"),
        ({"svhn": "path"}, r"not a str"),
        (
            {"svhn": {"w": torch.tensor([1.0, math.nan])}},
            r"task vector svhn\.w has entries that are not finite",
        ),
        ([torch.tensor(math.inf)], r"task vector 0 has entries that are not finite"),
    ]
    for deltas, message in cases:
        with pytest.raises(InputError, match=message):
            fit_offset(deltas)
    with pytest.raises(InputError, match=r"did you mean 'laplace'"):
        fit_offset([torch.ones(2)], "laplase")


@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
def test_mergopt_takes_mean_and_scale_from_task_vectors(distribution: str) -> None:
    deltas = {"w": draw_laplace(50_000, 0.02, 0.01)}
    wanted = fit_offset(deltas, distribution)
    w = nn.Parameter(torch.zeros(200_000))
    optimizer = MergOPT([w], BASES["sgd"], scale="fit", task_vectors=deltas, distribution=distribution, **UNIT)
    assert optimizer.fit == wanted
    assert (optimizer.loc, optimizer.scale) == (wanted.loc, wanted.scale)
    optimizer.train()
    again = fit_offset([w], distribution)
    assert again.loc == pytest.approx(wanted.loc, abs=5e-4)
    assert again.scale == pytest.approx(wanted.scale, rel=0.02)

    plain = MergOPT([nn.Parameter(torch.zeros(3))], BASES["sgd"])
    state = optimizer.state_dict()
    assert not any(isinstance(value, Tensor) for value in state["wrapper"].values())
    plain.load_state_dict(state)
    assert (plain.loc, plain.scale) == (wanted.loc, wanted.scale)


def test_a_fit_without_something_to_fit_or_with_a_number_beside_it_is_refused() -> None:
    make = partial(MergOPT, Net().named_parameters(), BASES["sgd"])
    with pytest.raises(InputError, match=r"scale='fit' needs task_vectors"):
        make(scale="fit")
    with pytest.raises(InputError, match=r"scale is 0\.0005: set scale='fit'"):
        make(task_vectors=[torch.ones(3)])
    with pytest.raises(InputError, match=r"loc.*loc=0\.1"):
        make(scale="fit", loc=0.1, task_vectors=[torch.ones(3)])
