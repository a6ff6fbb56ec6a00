from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mergekit_lab.merging import Method, merge_state_dicts

F64 = torch.float64
GOLDEN = Path(__file__).parents[1] / "data" / "golden"


class Golden:
    """The stored inputs of the golden vectors, and the stored outputs by name."""

    def __init__(self) -> None:
        self.base = load_file(GOLDEN / "inputs/base.safetensors")
        self.experts = [load_file(GOLDEN / f"inputs/expert_{t}.safetensors") for t in range(4)]
        self.fishers = [load_file(GOLDEN / f"inputs/fisher_{t}.safetensors") for t in range(4)]
        self.grams = [load_file(GOLDEN / f"inputs/regmean_gram_{t}.safetensors") for t in range(4)]

    def load_output(self, name: str) -> dict[str, Tensor]:
        return load_file(GOLDEN / f"outputs/{name}.safetensors")


def to_dtype(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}


def measure_error(merged: Tensor, wanted: Tensor) -> float:
    """`‖found − wanted‖ / ‖wanted‖`; the plain norm of the difference where `wanted` is zero."""
    difference = float((merged.double() - wanted.double()).norm())
    return difference / (float(wanted.double().norm()) or 1.0)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def merge_one(method: Method, deltas: Tensor, base: Tensor | None = None, name: str = "w", **options) -> Tensor:
    """The merged task vector of one tensor."""
    origin = torch.zeros_like(deltas[0]) if base is None else base
    experts = [{name: origin + delta} for delta in deltas]
    return merge_state_dicts({name: origin}, experts, method, **options)[name] - origin


@pytest.fixture(scope="session")
def golden() -> Golden:
    return Golden()
