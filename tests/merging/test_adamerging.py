"""AdaMerging: coefficients given, and learned from the entropy of predictions."""

import math

import pytest
import torch
from merging.conftest import F64, draw, measure_error
from torch import Tensor, nn

from mergekit_lab import InputError
from mergekit_lab.merging import AdaMerging, TaskArithmetic, learn_coefficients, merge_state_dicts


def test_adamerging_with_fixed_coefficients_is_a_sum_by_tensor_and_expert() -> None:
    base = {"fc.weight": draw(3, 4), "fc.bias": draw(3, seed=1), "scale": draw(seed=2)}
    a, b = ({n: v + draw(*v.shape, seed=s) for n, v in base.items()} for s in (3, 4))
    alphas = {"a": {"fc.weight": 0.1, "*": 0.7}, "b": {"fc.*": 0.5}}
    merged = merge_state_dicts(base, {"a": a, "b": b}, AdaMerging(weights=alphas))
    for name, first, second in (("fc.weight", 0.1, 0.5), ("fc.bias", 0.7, 0.5), ("scale", 0.7, 0.3)):
        wanted = base[name] + first * (a[name] - base[name]) + second * (b[name] - base[name])
        assert measure_error(merged[name], wanted) < 1e-12, name
    start = merge_state_dicts(base, {"a": a, "b": b}, AdaMerging())
    for name, value in merge_state_dicts(base, {"a": a, "b": b}, TaskArithmetic(coefficient=0.3)).items():
        assert measure_error(start[name], value) < 1e-12


class Tiny(nn.Module):
    """An encoder with a buffer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 6, dtype=F64)
        self.fc2 = nn.Linear(6, 6, bias=False, dtype=F64)
        self.fc3 = nn.Linear(6, 6, bias=False, dtype=F64)
        self.fc3.weight = self.fc2.weight
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


def make_tiny_problem():
    """Base, experts, the callable of logits and one batch: two tasks with a frozen head each."""
    torch.manual_seed(0)
    encoder = Tiny().requires_grad_(False)
    base = encoder.state_dict()
    experts = {}
    for seed, name in enumerate(("a", "b")):
        moved = {n: v + draw(*v.shape, seed=seed) if v.dtype == F64 else v for n, v in base.items()}
        experts[name] = moved | {"fc3.weight": moved["fc2.weight"]}
    heads = draw(2, 6, 3, seed=5)

    def compute_logits(state, batch) -> list[Tensor]:
        return [
            torch.func.functional_call(encoder, state, x) @ head for x, head in zip(batch, heads, strict=True)
        ]

    return base, experts, compute_logits, draw(2, 16, 4, seed=6)


def compute_entropy(state, logits, batch) -> float:
    probabilities = [out.softmax(dim=1) for out in logits(state, batch)]
    return sum(float(-(p * p.log()).sum(dim=1).mean()) for p in probabilities)


@pytest.mark.parametrize("layer_wise", [True, False])
def test_learning_coefficients_lowers_the_entropy_of_the_merged_model(layer_wise: bool) -> None:
    base, experts, logits, batch = make_tiny_problem()
    before = {name: value.clone() for name, value in base.items()}
    method, entropies = learn_coefficients(base, experts, logits, [batch] * 100, layer_wise=layer_wise, lr=1e-2)
    first = compute_entropy(merge_state_dicts(base, experts, AdaMerging()), logits, batch)
    last = compute_entropy(merge_state_dicts(base, experts, method), logits, batch)
    assert entropies[0] == pytest.approx(first, rel=1e-12)
    assert last < entropies[-1] < 0.9 * first
    assert all(torch.equal(base[n], v) for n, v in before.items())
    assert set(method.weights) == {"a", "b"}
    if layer_wise:
        assert list(method.weights["a"]) == ["fc1.weight", "fc1.bias", "fc2.weight"]
        values = [v for by_tensor in method.weights.values() for v in by_tensor.values()]
    else:
        values = list(method.weights.values())
    assert all(0 <= v <= 1 for v in values)


def test_the_first_step_moves_each_coefficient_by_lr_against_its_slope() -> None:
    """Adam's first step is lr·sign(gradient); the slope is a finite difference through the merger."""
    base, experts, logits, batch = make_tiny_problem()
    method, _ = learn_coefficients(base, experts, logits, [batch])
    for expert in experts:
        for tensor in ("fc1.weight", "fc1.bias", "fc2.weight"):

            def compute_entropy_at(alpha: float, expert=expert, tensor=tensor) -> float:
                weights = {e: {tensor: alpha} if e == expert else 0.3 for e in experts}
                merged = merge_state_dicts(base, experts, AdaMerging(weights=weights))
                return compute_entropy(merged, logits, batch)

            slope = compute_entropy_at(0.3 + 1e-5) - compute_entropy_at(0.3 - 1e-5)
            wanted = 0.3 - math.copysign(1e-3, slope)
            assert method.weights[expert][tensor] == pytest.approx(wanted, abs=1e-6)


def test_learned_coefficients_stay_between_zero_and_one() -> None:
    base, experts, logits, batch = make_tiny_problem()
    method, _ = learn_coefficients(base, experts, logits, [batch] * 4, layer_wise=False, lr=5.0)
    assert set(method.weights.values()) <= {0.0, 1.0}


def test_learning_refuses_what_it_cannot_use() -> None:
    base, experts, logits, batch = make_tiny_problem()
    with pytest.raises(InputError, match="no batch was given"):
        learn_coefficients(base, experts, logits, [])
    with pytest.raises(InputError, match="lr is 0"):
        learn_coefficients(base, experts, logits, [batch], lr=0)
    with pytest.raises(InputError, match="start is 2"):
        learn_coefficients(base, experts, logits, [batch], start=2)
    with pytest.raises(InputError, match="nan at step 0"):
        learn_coefficients(base, experts, lambda s, b: [x * math.nan for x in logits(s, b)], [batch])
    broken = {n: v for n, v in experts["b"].items() if n != "fc1.bias"}
    with pytest.raises(InputError, match="'b' lacks 1 tensors"):
        learn_coefficients(base, experts | {"b": broken}, logits, [batch])
