"""A copy of the weights while a method has moved them."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.optim.sharded import take_parts


class SavedWeights:
    """A copy of θ while a method has moved the weights; its memory is kept for the next time.

    To allocate a tensor a parameter in every step costs more than the copying where a GPU waits for its CPU.

    Changed in place only: Lightning hands out a stand-in whose attributes are not the optimizer's own, and a
    method called on it must still reach this copy.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[list[Tensor], list[Tensor]]] = []
        self._memory: dict[Tensor, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "SavedWeights":
        copied = SavedWeights()
        copied._kept = deepcopy(self._kept, memo)
        return copied

    @property
    def held(self) -> bool:
        """Whether the weights are away from θ."""
        return bool(self._kept)

    def save(self, params: list[Tensor], copy: bool = True) -> list[Tensor]:
        """Copy `params`, and return the copies (same shapes, dtypes and devices).

        Without `copy` they hold anything, and the caller fills them before `restore` is called.
        """
        copies = [p.detach().clone() for p in params] if self._kept else self.refill(params, copy)
        self._kept.append((list(params), copies))
        return copies

    def refill(self, params: list[Tensor], copy: bool = True) -> list[Tensor]:
        """Copies of `params` in the memory that is kept, which are not put back by `restore`."""
        memory = self._memory
        if len(memory) != len(params) or not all(p in memory and _fits(memory[p], p) for p in params):
            memory.clear()
            memory.update({p: p.detach().clone() for p in params})
        elif params and copy:
            torch._foreach_copy_(take_parts(list(memory.values())), take_parts([p.detach() for p in memory]))
        return [memory[p] for p in params]

    def release(self) -> None:
        """Let go of the memory that is kept for the next time."""
        self._memory.clear()

    def restore(self) -> None:
        """Put the copies back, bit for bit. Does nothing when none is held."""
        while self._kept:
            params, copies = self._kept.pop()
            if params:
                torch._foreach_copy_(take_parts(params), take_parts(copies))


def _fits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
