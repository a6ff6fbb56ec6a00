"""The precision of what an optimizer adds to weights: float32 or wider."""

import torch
from torch import Tensor


def widen_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for a float64 tensor, float32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def widen(tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor in float32 if its precision is lower, else as it is."""
    return [t.to(widen_dtype(t)) for t in tensors]


def move_to_parameter(state: Tensor, parameter: Tensor) -> Tensor:
    """Move a saved tensor to its parameter's device and, if floating, to its wide dtype."""
    dtype = widen_dtype(parameter) if state.is_floating_point() else state.dtype
    return state.to(parameter.device, dtype)
