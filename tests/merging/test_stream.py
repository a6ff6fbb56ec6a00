"""Models with batch norm merge: counters are the base's, running statistics as asked for."""

import copy

import pytest
import torch
from torch import Tensor, nn

from mergekit_lab import InputError
from mergekit_lab.merging import TIES, TSVM, TaskArithmetic, WeightAverage, merge_state_dicts


def make_models() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """A base, and experts that saw 3 and 4 batches."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    experts = []
    for steps in (3, 4):
        expert = copy.deepcopy(net)
        for _ in range(steps):
            expert(torch.randn(8, 3, 8, 8))
        experts.append(expert.state_dict())
    return net.state_dict(), experts


@pytest.mark.parametrize(
    "options", [{}, {"exclude": ["1.*"]}, {"include": ["0.*"]}, {"buffers": "base"}], ids=repr
)
def test_counters_are_the_bases_and_statistics_as_asked_for(options: dict) -> None:
    base, experts = make_models()
    merged = merge_state_dicts(base, experts, WeightAverage(), **options)
    assert merged["1.num_batches_tracked"] == 0
    kept = bool(options)
    for name in ("1.running_mean", "1.running_var"):
        mean = torch.stack([expert[name] for expert in experts]).mean(dim=0)
        assert torch.allclose(merged[name], base[name] if kept else mean), name
    assert not torch.equal(base["1.running_mean"], experts[0]["1.running_mean"])


@pytest.mark.parametrize(
    "method", [TaskArithmetic(coefficient=3.0), TIES(coefficient=9.0), TSVM(coefficient=9.0)], ids=repr
)
def test_a_variance_does_not_become_negative(method) -> None:
    base, experts = make_models()
    for expert in experts:
        expert["1.running_var"] = torch.tensor([0.5, 0.25, 1.0, 0.75])
    notes: dict = {}
    merged = merge_state_dicts(base, experts, method, notes=notes)
    assert merged["1.running_var"].tolist() == [0.5, 0.25, 1.0, 0.75]
    assert "3 negative entries" in notes["1.running_var"]["variance"]
    merge_state_dicts(base, experts, TaskArithmetic(coefficient=0.5), notes=(calm := {}))
    assert "1.running_var" not in calm


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.int64, torch.float32), (torch.int64, None)])
def test_counters_are_the_bases_in_any_dtype_and_where_experts_have_none(dtypes) -> None:
    """Whole state dicts are cast; old ones have no counters."""
    base, experts = make_models()
    counter = "1.num_batches_tracked"
    for state, dtype in zip((base, *experts), (dtypes[0], dtypes[1], dtypes[1]), strict=True):
        value = state.pop(counter)
        state |= {} if dtype is None else {counter: value.to(dtype)}
    merged = merge_state_dicts(base, experts, WeightAverage())
    assert merged[counter] == 0
    assert merged[counter].dtype is dtypes[0]


def test_other_buffers_that_differ_and_unknown_wishes_are_refused() -> None:
    base, experts = make_models()
    base["ids"], *others = (torch.arange(3) + shift for shift in (0, 0, 1))
    for expert, value in zip(experts, others, strict=True):
        expert["ids"] = value
    with pytest.raises(InputError, match=r"than the base \(ids\)"):
        merge_state_dicts(base, experts, WeightAverage())
    with pytest.raises(InputError, match=r"buffers is 'bases'.*'base'"):
        merge_state_dicts(*make_models(), WeightAverage(), buffers="bases")
