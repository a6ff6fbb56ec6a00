"""The diagonal Fisher is the mean of squared per-sample gradients, nothing else."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mergekit_lab.curvature import diagonal_fisher


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Dropout(0.5), nn.Linear(7, 3))


def compute_dense(model: nn.Module, x, y) -> dict[str, torch.Tensor]:
    totals = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for sample, label in zip(x, y, strict=True):
        model.zero_grad()
        functional.cross_entropy(model(sample[None]), label[None]).backward()
        for name, p in model.named_parameters():
            totals[name] += p.grad**2
    return {n: t / len(y) for n, t in totals.items()}


def draw_data(count: int = 20):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 5, generator=generator), torch.arange(count) % 3


def test_it_equals_a_loop_over_samples(model) -> None:
    x, y = draw_data()
    fisher = diagonal_fisher(model, [(x[:11], y[:11]), (x[11:], y[11:])], chunk=4)
    wanted = compute_dense(model.eval(), x, y)
    for name, value in wanted.items():
        torch.testing.assert_close(fisher[name], value, rtol=1e-5, atol=1e-9)


def test_it_is_not_the_square_of_the_batch_gradient(model) -> None:
    x, y = draw_data()
    model.eval()
    functional.cross_entropy(model(x), y).backward()
    fisher = diagonal_fisher(model, [(x, y)])
    assert not torch.allclose(fisher["0.weight"], model[0].weight.grad ** 2, rtol=0.1)


def test_neither_chunks_nor_batches_matter(model) -> None:
    x, y = draw_data()
    whole = diagonal_fisher(model, [(x, y)], chunk=64)
    pieces = diagonal_fisher(model, zip(x.split(3), y.split(3), strict=True), chunk=2)
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=1e-5, atol=1e-9)


def test_frozen_parameters_have_no_fisher_and_the_model_is_left_as_it_was(model) -> None:
    model[0].weight.requires_grad_(False)
    model.train()
    before = {n: p.clone() for n, p in model.named_parameters()}
    fisher = diagonal_fisher(model, [draw_data()])
    assert "0.weight" not in fisher
    assert "0.bias" in fisher
    assert model.training
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())


def test_sampled_labels_follow_the_model_and_the_seed(model) -> None:
    """The trace's expectation over sampled labels is known in closed form for the last bias: Σ p(1−p)."""
    x, y = draw_data(2000)
    model.eval()
    chances = model(x).softmax(-1)
    wanted = (chances * (1 - chances)).mean(0)
    fisher = diagonal_fisher(model, [(x, y)], sampled=True, seed=3)["4.bias"]
    torch.testing.assert_close(fisher, wanted.detach(), rtol=0.1, atol=0)
    again = diagonal_fisher(model, [(x, y)], sampled=True, seed=3)["4.bias"]
    other = diagonal_fisher(model, [(x, y)], sampled=True, seed=4)["4.bias"]
    assert torch.equal(fisher, again)
    assert not torch.equal(fisher, other)
