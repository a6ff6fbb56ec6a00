"""RegMean against least squares, and the Grams that it refuses."""

import pytest
import torch
from merging.conftest import F64, draw, measure_error, merge_one
from torch import Tensor

from mergekit_lab import InputError
from mergekit_lab.merging import RegMean


def merge_by_regmean(method: RegMean, deltas: Tensor, grams: Tensor, base: Tensor | None = None) -> Tensor:
    statistics = {"gram": [{"fc": gram} for gram in grams]}
    return merge_one(method, deltas, base, "fc.weight", statistics=statistics)


def test_regmean_is_the_least_squares_fit_to_the_experts_outputs() -> None:
    inputs, deltas, base = draw(3, 20, 5), draw(3, 4, 5, seed=1), draw(4, 5, seed=2)
    weights = base + deltas
    rows = inputs.reshape(-1, 5)
    outputs = (inputs @ weights.mT).reshape(-1, 4)
    wanted = torch.linalg.lstsq(rows, outputs).solution.T
    grams = inputs.mT @ inputs
    before = grams.clone()
    assert measure_error(merge_by_regmean(RegMean(), deltas, grams, base) + base, wanted) < 1e-12
    assert torch.equal(grams, before)
    assert measure_error(merge_by_regmean(RegMean(), deltas, 7 * grams, base) + base, wanted) < 1e-12


def test_regmean_without_off_diagonals_weighs_input_by_input() -> None:
    inputs, deltas = draw(3, 20, 5), draw(3, 4, 5, seed=1)
    energy = inputs.square().sum(dim=1)
    wanted = (energy[:, None] * deltas).sum(dim=0) / energy.sum(dim=0)
    assert measure_error(merge_by_regmean(RegMean(ratio=0.0), deltas, inputs.mT @ inputs), wanted) < 1e-12


def test_regmean_with_equal_grams_a_large_ridge_or_no_gram_is_the_mean() -> None:
    inputs, deltas = draw(3, 20, 5), draw(3, 4, 5, seed=1)
    grams = inputs.mT @ inputs
    mean = deltas.mean(dim=0)
    assert measure_error(merge_by_regmean(RegMean(), deltas, grams[:1].expand(3, -1, -1)), mean) < 1e-12
    assert measure_error(merge_by_regmean(RegMean(ridge=1e12), deltas, grams), mean) < 1e-10
    some = merge_by_regmean(RegMean(ridge=0.1), deltas, grams)
    assert measure_error(some, mean) > 1e-2
    assert measure_error(merge_by_regmean(RegMean(ridge=0.1), deltas, 100 * grams), some) < 1e-12
    assert measure_error(merge_one(RegMean(), deltas, statistics={"gram": [{}] * 3}), mean) < 1e-12
    with pytest.raises(InputError, match="of 0 holds"):
        merge_one(RegMean(), deltas, name="fc2.weight", statistics={"gram": [{"fc": g} for g in grams]})
    with pytest.raises(InputError, match=r"of 1 and.*of 0 differ.*\(fc\)"):
        merge_one(
            RegMean(), deltas, name="fc.weight", statistics={"gram": [{"fc": grams[0]}, {}, {"fc": grams[2]}]}
        )


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_regmean_names_the_tensor_whose_grams_are_singular(dtype: torch.dtype) -> None:
    inputs, deltas = draw(2, 20, 5).to(dtype), draw(2, 4, 5, seed=1).to(dtype)
    inputs[..., 4] = inputs[..., 0] - 2 * inputs[..., 1]
    grams = inputs.mT @ inputs
    with pytest.raises(InputError, match=r"'fc.weight'.*\(some"):
        merge_by_regmean(RegMean(), deltas, grams)
    assert bool(torch.isfinite(merge_by_regmean(RegMean(ratio=0.9), deltas, grams)).all())
    inputs[..., 4] = 0
    dead = inputs.mT @ inputs
    with pytest.raises(InputError, match=r"'fc.weight'.*\(1"):
        merge_by_regmean(RegMean(), deltas, dead)
    assert bool(torch.isfinite(merge_by_regmean(RegMean(ridge=1e-3), deltas, dead)).all())


def test_regmean_names_a_gram_that_does_not_fit_its_weight() -> None:
    with pytest.raises(InputError, match=r"'fc.weight' is \[4, 4\].*\[4, 5\]"):
        merge_by_regmean(RegMean(), draw(2, 4, 5), torch.eye(4, dtype=F64).expand(2, 4, 4))


def test_weights_of_regmean_scale_the_grams() -> None:
    inputs, deltas = draw(3, 20, 5), draw(3, 4, 5, seed=1)
    grams = inputs.mT @ inputs
    factors = torch.tensor([0.5, 2.0, 1.0], dtype=F64)
    merged = merge_by_regmean(RegMean(weights=factors.tolist()), deltas, grams)
    assert measure_error(merged, merge_by_regmean(RegMean(), deltas, factors.view(3, 1, 1) * grams)) < 1e-12
