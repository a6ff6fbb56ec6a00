"""Casts that lose no magnitude."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mergekit_lab.errors import InputError

FLOATING = {"float32", "float64", "float16", "bfloat16"}
"""Names of the dtypes that a model is stored in."""

_NARROW = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""What does not reach as far as float32; bfloat16 does, but for its last 0.4 %."""


def check_range(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Refuse what a narrow dtype cannot hold, before the cast, which may give infinity or the largest number.

    Args:
        name: the tensor's name, for the message.
        values: of any shape. Existing infinities, as in masks, are not overflow.
        dtype: the dtype to cast to.

    Raises:
        InputError: a finite value is beyond the largest of `dtype`.
    """
    if values.dtype == dtype or not values.numel() or (dtype not in _NARROW and values.dtype != torch.float64):
        return
    info = torch.finfo(dtype)
    limit = info.max + info.eps * 2.0 ** math.floor(math.log2(info.max)) / 2
    values = values if values.dtype == torch.float64 else values.float()
    if not _are_within(values, limit) and not _are_within(values.nan_to_num(0.0, 0.0, 0.0), limit):
        wider = "float64" if values.dtype == torch.float64 and dtype not in _NARROW else "bfloat16 or float32"
        raise InputError(f"the tensor {name!r} overflows {dtype}: set dtype to {wider}")


def _are_within(values: Tensor, limit: float) -> bool:
    low, high = values.aminmax()
    return bool(torch.maximum(high, -low) < limit)


def cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor to another dtype. `check_range` says what is refused."""
    check_range(name, values, dtype)
    return values.to(dtype)
