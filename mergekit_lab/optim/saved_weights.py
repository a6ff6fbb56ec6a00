"""A copy of the weights while a method has moved them."""

import torch
from torch import Tensor

from mergekit_lab.optim.sharded import take_parts


class SavedWeights:
    """A copy of θ while a method has moved the weights. Its memory is reused in later steps.

    If a GPU waits for its CPU, allocating a tensor per parameter in every step costs more than copying.

    It is only changed in place. Lightning wraps the optimizer in an object with separate attributes, and
    methods called on that must still reach this copy.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[list[Tensor], list[Tensor]]] = []
        self._memory: dict[Tensor, Tensor] = {}

    @property
    def held(self) -> bool:
        """Whether the weights are moved away from θ."""
        return bool(self._kept)

    def save(self, params: list[Tensor], copy: bool = True) -> list[Tensor]:
        """Copy `params` and return the copies (same shapes, dtypes and devices).

        Without `copy` their values are undefined, and the caller fills them before `restore`.
        """
        copies = [p.detach().clone() for p in params] if self._kept else self.refill(params, copy)
        self._kept.append((list(params), copies))
        return copies

    def refill(self, params: list[Tensor], copy: bool = True) -> list[Tensor]:
        """Copy `params` into the reused memory. `restore` does not restore these copies."""
        memory = self._memory
        if len(memory) != len(params) or not all(p in memory and _fits(memory[p], p) for p in params):
            memory.clear()
            memory.update({p: p.detach().clone() for p in params})
        elif params and copy:
            torch._foreach_copy_(take_parts(list(memory.values())), take_parts([p.detach() for p in memory]))
        return [memory[p] for p in params]

    def release(self) -> None:
        """Free the reused memory."""
        self._memory.clear()

    def restore(self) -> None:
        """Restore the weights from the copies, bit for bit. Does nothing if there are none."""
        while self._kept:
            params, copies = self._kept.pop()
            if params:
                torch._foreach_copy_(take_parts(params), take_parts(copies))


def _fits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
