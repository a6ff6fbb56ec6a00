import pytest
import torch
from torch import Tensor

from mergekit_lab import InputError
from mergekit_lab.merging import Method, WeightAverage, merge_state_dicts

F64 = torch.float64


def to_dtype(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}


def measure_error(merged: Tensor, wanted: Tensor) -> float:
    """`‖merged − wanted‖ / ‖wanted‖`; the plain norm of the difference where `wanted` is zero."""
    difference = float((merged.double() - wanted.double()).norm())
    return difference / (float(wanted.double().norm()) or 1.0)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def merge_one(method: Method, deltas: Tensor, base: Tensor | None = None, name: str = "w", **options) -> Tensor:
    """The merged task vector of one tensor."""
    origin = torch.zeros_like(deltas[0]) if base is None else base
    experts = [{name: origin + delta} for delta in deltas]
    return merge_state_dicts({name: origin}, experts, method, **options)[name] - origin


def make_state(**changes):
    tensors = {"w": torch.zeros(3, 2), "b": torch.zeros(3), "ids": torch.arange(4)}
    return {k: v for k, v in (tensors | changes).items() if v is not None}


def refuse(match: str, base=None, experts=None, method=None, **options) -> None:
    with pytest.raises(InputError, match=match):
        merge_state_dicts(
            base or make_state(),
            {"svhn": make_state()} if experts is None else experts,
            method or WeightAverage(),
            **options,
        )
