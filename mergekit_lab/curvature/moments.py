"""A Fisher diagonal from what an optimizer remembers: `F = u²`, u the first moment of its gradients.

The supplement of EpiMer takes it for its Fisher-averaging baseline, since it costs nothing: Adam keeps u
anyway. It is the square of an averaged batch gradient, not an average of squared sample gradients
(`diagonal_fisher`), and near the end of training it is mostly noise of the last 1/(1−β₁) batches.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from mergekit_lab.errors import InputError, listing

_MOMENTS = ("exp_avg", "momentum_buffer")


def squared_first_moment(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """`u²` for every parameter that requires gradients.

    Args:
        optimizer: after at least one step: Adam and its kin, SGD with momentum, or one of `mergekit_lab.optim`
            around such a one. The moment is taken as it is kept, without Adam's bias correction.
        named_parameters: `model.named_parameters()`.

    Returns:
        By name, shaped like the parameter, float32 or float64.

    Raises:
        InputError: a parameter for which the optimizer keeps no first moment.
    """
    found, without = {}, []
    for name, p in named_parameters:
        if not p.requires_grad:
            continue
        state = optimizer.state.get(p, {})
        moment = next((state[key] for key in _MOMENTS if state.get(key) is not None), None)
        if moment is None:
            without.append(name)
        else:
            found[name] = (moment if moment.dtype.itemsize > 4 else moment.float()).square()
    if without:
        raise InputError(
            f"{type(optimizer).__name__} keeps no first moment of {listing(without)}: it must have stepped, "
            "and be Adam or SGD with momentum"
        )
    return found
