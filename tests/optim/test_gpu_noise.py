"""MergOPT's kernel, run by Triton's interpreter, saves the weights and adds the offset that it promises."""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from mergekit_lab.optim.noise import Noise

pytest.importorskip("triton")


def list_loaded() -> list[str]:
    """Modules of Triton, without what is compiled, which Python can load but once."""
    names = [name for name in sys.modules if name.partition(".")[0] == "triton"]
    return [name for name in names if not name.startswith("triton._C")]


@pytest.fixture(scope="module")
def kernels():
    """With a Triton of its own, for functions of Triton's library are interpreted only if they were made so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in list_loaded():
            patch.delitem(sys.modules, name)
        patch.delitem(sys.modules, "mergekit_lab.optim.gpu_noise", raising=False)
        yield importlib.import_module("mergekit_lab.optim.gpu_noise")
        for name in list_loaded():
            del sys.modules[name]
    sys.modules.pop("mergekit_lab.optim.gpu_noise", None)


def move(kernels: ModuleType, params: list[Tensor], first: list[int], seed: int = 5, **size) -> list[Tensor]:
    """Moves `params`; returns their copies."""
    copies = [torch.full_like(p, torch.nan) for p in params]
    factor = torch.tensor(size.pop("factor", 1.0))
    noise = Noise(**{"distribution": "laplace"} | size)
    kernels.save_and_move(params, copies, first, torch.tensor(seed), factor, noise)
    return copies


@pytest.mark.parametrize(("distribution", "law"), [("laplace", "laplace"), ("gaussian", "norm")])
def test_offsets_have_the_distribution_they_are_named_after(kernels, distribution, law) -> None:
    weights = torch.zeros(90, 500)
    copies = move(kernels, [weights], [0], distribution=distribution, loc=0.3, scale=0.2, factor=-2.0)
    assert not copies[0].any()
    assert kstest(((weights.flatten() / -2 - 0.3) / 0.2).numpy(), law).pvalue > 0.01
    neighbors = torch.corrcoef(torch.stack([weights.flatten()[:-1], weights.flatten()[1:]]))[0, 1]
    assert abs(float(neighbors)) < 0.02


def test_an_entry_s_offset_depends_on_its_number_and_the_seed_alone(kernels) -> None:
    whole, part, other = torch.zeros(9001), torch.zeros(4902), torch.zeros(4902)
    move(kernels, [whole], [2**35])
    move(kernels, [torch.zeros(3), part], [7, 2**35 + 4099])
    move(kernels, [other], [2**35 + 4099], seed=-6)
    assert torch.equal(whole[4099:], part)
    assert not torch.equal(part, other)
    assert len(whole.unique()) > 8990


def test_copies_hold_the_weights_in_their_own_precision(kernels) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(40, 30, generator=generator)
    params = [wide.clone(), wide.bfloat16(), wide.half()]
    before = [p.clone() for p in params]
    copies = move(kernels, params, [0, 1200, 0], scale=0.1)
    assert all(torch.equal(copy, p) for copy, p in zip(copies, before, strict=True))
    offset = params[0] - before[0]
    torch.testing.assert_close(params[2], (before[2].float() + offset).half(), atol=1e-3, rtol=1e-3)
    assert params[1].sub(before[1]).float().abs().mean() == pytest.approx(0.1, rel=0.1)
