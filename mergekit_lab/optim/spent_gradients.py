"""Which gradients a step may drop: those that a step has used already, and zeros.

This is noted on the gradient itself, for then a new one has no such note, and one that was added to has another
version.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.optim.sharded import take_part


def mark_spent(parameters: Iterable[Tensor]) -> None:
    """Note that nothing is lost if the gradients that these parameters now have go."""
    for p in parameters:
        grad: Any = p.grad
        if grad is not None:
            grad.spent_version = take_part(grad)._version


def list_unspent(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters whose gradient no step has used; none if all those were zeroed in place. Waits for the
    device only if there are any.
    """
    new = {
        p: grad
        for p in parameters
        if (grad := p.grad) is not None and getattr(grad, "spent_version", -1) != take_part(grad)._version
    }
    hold = any(grad.layout is not torch.strided or bool(take_part(grad).any()) for grad in new.values())
    return list(new) if hold else []
