"""The GPU kernels, run by Triton's interpreter on the CPU, give what the CPU's own path gives."""

import importlib
import math
import sys
from types import ModuleType

import pytest
import torch

from mergekit_lab.merging import dropping
from mergekit_lab.merging.dropping import Counters, draw_mask, draw_uniform
from mergekit_lab.merging.kernels import DigitCounts

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def gpu_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, "mergekit_lab.merging.gpu_kernels", raising=False)
        yield importlib.import_module("mergekit_lab.merging.gpu_kernels")
    sys.modules.pop("mergekit_lab.merging.gpu_kernels", None)


@pytest.mark.parametrize(("known", "width", "copies"), [(0, 11, 64), (11, 10, 64), (21, 10, 1), (11, 20, 1)])
def test_digits_are_counted_as_on_the_cpu(gpu_kernels: ModuleType, known: int, width: int, copies: int) -> None:
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(3, 2500, generator=generator) * torch.randn(3, 2500, generator=generator).abs()
    block[:, ::3] = -0.5
    block = block[:, :2345]  # rows that do not follow each other in memory
    prefix = torch.tensor([0b0111111000, 0b0111111010, 0b0111110000]) << max(0, known - 10)
    expected = DigitCounts(prefix, known, width)
    expected.add(block)
    counts = torch.zeros(3, copies, 1 << width, dtype=torch.int64)
    gpu_kernels.count_digits(block, prefix, counts, known, width)
    gpu_kernels.count_digits(block, prefix, counts, known, width)
    assert torch.equal(counts.sum(dim=1), 2 * expected.compute_total())
    assert known > 0 or expected.compute_total().sum() == block.numel()


@pytest.mark.parametrize("drop", [0.0, 0.5, 0.9, 1 - 2**-32])
def test_draws_are_those_of_the_cpu(gpu_kernels: ModuleType, drop: float) -> None:
    keys = [7, -(2**63), 2**63 - 1, 1234567]
    draws = [[Counters(key, 2**40 + 3, 2345)] for key in keys]
    both = torch.tensor([[key, 0] for key in keys])
    drawn, expected = torch.empty(2, 4, 2345, dtype=torch.bool)
    gpu_kernels.draw(drawn, both[:, 0], 2**40 + 3, math.ceil(drop * 2.0**32), dropping.FACTORS)
    draw_mask(draws, expected, drop)
    assert torch.equal(drawn, expected)
    uniform = torch.empty(4, 3000, dtype=torch.float64)[:, 5:2350]  # rows that do not follow each other
    gpu_kernels.draw(uniform, both[:, 0], 2**40 + 3, 0, dropping.FACTORS)
    assert torch.equal(uniform, torch.stack([draw_uniform(each, uniform.device) for each in draws]))
    assert torch.equal(expected, uniform >= drop)


def test_nothing_is_kept_where_next_to_all_is_dropped() -> None:
    kept = torch.ones(1, 9, dtype=torch.bool)
    draw_mask([[Counters(7, 0, 9)]], kept, 1 - 2**-53)
    assert not kept.any()
