"""Count digits of magnitudes: inner loops that torch's operations alone would make slow.

Legend: `T` experts, `n` a flat block's length.
"""

from typing import Any

import torch
from torch import Tensor

from mergekit_lab.triton_kernels import load_kernels

BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The integer type with the same number of bits."""


def to_array(values: Tensor) -> Any:
    """The values as a NumPy array on a CPU, where NumPy's bit operations are much faster; else unchanged."""
    return values.numpy() if values.device.type == "cpu" else values


class DigitCounts:
    """How often each `width`-bit digit follows a prefix, in the magnitudes of each expert.

    A magnitude is a number's bits without the sign; `known` of them, from the left, are the prefix.

    Args:
        prefix: `[T]`, int64, one for each expert. It is not read if `known` is 0.
        known: bits of the prefix.
        width: bits of the digit.
    """

    def __init__(self, prefix: Tensor, known: int, width: int) -> None:
        self._prefix, self._known, self._width = prefix, known, width
        self._gpu = load_gpu_kernels() if prefix.is_cuda else None
        copies = _COPIES if self._gpu and width <= _CROWDED else 1
        shape = (len(prefix), copies, 1 << width)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=prefix.device)

    def add(self, block: Tensor) -> None:
        """Count a block `[T, n]`, float32 or float64."""
        if self._gpu and block.dtype == torch.float32:
            self._gpu.count_digits(block, self._prefix, self._counts, self._known, self._width)
            return
        for counts, row, prefix in zip(self._counts[:, 0], block, self._prefix.tolist(), strict=True):
            _count_row(counts, row, prefix, self._known, self._width)

    def compute_total(self) -> Tensor:
        """`[T, 2^width]`, int64."""
        return self._counts[:, 0] if self._counts.shape[1] == 1 else self._counts.sum(dim=1)


def _count_row(counts: Tensor, row: Tensor, prefix: int, known: int, width: int) -> None:
    integer = BITS[row.dtype]
    size = torch.iinfo(integer).bits - 1
    bits = to_array(row.view(integer)) & torch.iinfo(integer).max
    if known == 0:
        counts += torch.bincount(torch.as_tensor(bits >> (size - width)), minlength=len(counts))
        return
    digits = torch.as_tensor(bits[(bits >> (size - known)) == prefix])
    digits = (digits >> (size - known - width)) & (len(counts) - 1)
    counts.scatter_add_(0, digits.long(), counts.new_ones(1).expand(len(digits)))


_CROWDED = 11
"""Digits of up to so many bits have several copies of each counter. Most numbers share a few exponents, so a
GPU's threads would wait for each other at a single copy."""
_COPIES = 64


def load_gpu_kernels() -> Any:
    """The module `gpu_kernels`; None if its kernels cannot run here."""
    return load_kernels(f"{__package__}.gpu_kernels", "torch trims and drops entries")
