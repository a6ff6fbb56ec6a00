"""A Fisher diagonal from what an optimizer remembers: `F = u²`, u the first moment of its gradients.

The supplement of EpiMer takes it for its Fisher-averaging baseline, since it costs nothing: Adam keeps u
anyway. It is the square of an averaged batch gradient, not an average of squared sample gradients
(`diagonal_fisher`), and near the end of training it is mostly noise of the last 1/(1−β₁) batches.

Where the optimizer is gone (an expert that others trained, or whose best weights are not its last),
`first_moment` goes through batches at the weights as they are: the moment of Adam with a learning rate of 0.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mergekit_lab.batches import Batch, count_samples, cut_batch
from mergekit_lab.curvature.fisher import switch_to_evaluation
from mergekit_lab.curvature.likelihood import compute_logits, log_likelihood
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.optim.precision import widen_dtype
from mergekit_lab.ranges import Count, check_value, require

_MOMENTS = ("exp_avg", "momentum_buffer")


def first_moment(
    model: nn.Module, batches: Iterable[Batch], *, causal: bool = False, beta: float = 0.9, chunk: int = 32
) -> dict[str, Tensor]:
    """`u ← β u + (1−β) g` over batches, from 0; g the gradient of a batch's mean negative log-likelihood.

    Args:
        model, batches, causal, chunk: as of `diagonal_fisher`; a batch is one step of the optimizer.
        beta: β₁, in [0, 1).

    Returns:
        u, not its square, of every parameter that requires gradients: by name, of its shape, without Adam's
        bias correction, float32 or float64. Zero without a gradient.

    Raises:
        InputError: a beta or chunk out of range, or no batch.
    """
    require(0 <= beta < 1, "beta", beta, "in [0, 1)")
    check_value(chunk, Count, "chunk")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    moments = {n: torch.zeros_like(p, dtype=widen_dtype(p)) for n, p in trained.items()}
    seen = 0
    with switch_to_evaluation(model), torch.enable_grad():
        for batch in batches:
            seen += count_samples(batch)
            for moment in moments.values():
                moment.mul_(beta)
            for part in cut_batch(batch, chunk):
                loss = -log_likelihood(*compute_logits(model, part, causal)) / count_samples(batch)
                gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
                for moment, gradient in zip(moments.values(), gradients, strict=True):
                    if gradient is not None:
                        moment.add_(gradient, alpha=1 - beta)
    if not seen:
        raise InputError("a first moment needs one batch or more")
    return moments


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
    squares, without = {}, []
    for name, p in named_parameters:
        if not p.requires_grad:
            continue
        state = optimizer.state.get(p, {})
        moment = next((state[key] for key in _MOMENTS if state.get(key) is not None), None)
        if moment is None:
            without.append(name)
        else:
            squares[name] = moment.to(widen_dtype(moment)).square()
    if without:
        raise InputError(
            f"{type(optimizer).__name__} keeps no first moment of {join_names(without)}: it must have stepped, "
            "and be Adam or SGD with momentum"
        )
    return squares
