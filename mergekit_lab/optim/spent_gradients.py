"""Which gradients a step may drop: those that a step has used already, and zeros.

A used gradient is marked with torch's version counter of the tensor, as an attribute of the tensor itself. So a
new gradient has no mark, and one that was added to has another version than its mark.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.optim.sharded import take_part


def mark_spent(parameters: Iterable[Tensor]) -> None:
    """Mark the gradients that these parameters have now: nothing is lost if they are dropped."""
    for p in parameters:
        grad: Any = p.grad
        if grad is not None:
            grad.spent_version = take_part(grad)._version


def list_unspent(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters whose gradient no step has used; none if all these gradients are zero. It waits for the
    device only if there are unused gradients.
    """
    new = {
        p: grad
        for p in parameters
        if (grad := p.grad) is not None and getattr(grad, "spent_version", -1) != take_part(grad)._version
    }
    hold = any(grad.layout is not torch.strided or bool(take_part(grad).any()) for grad in new.values())
    return list(new) if hold else []
