"""What a training loop asks of any torch optimizer: what a step costs, and whether it bears accumulation."""

from fractions import Fraction
from typing import Any

from mergekit_lab.errors import InputError


def count_gradient_evaluations(optimizer: Any) -> Fraction:
    """Gradients of a whole batch that a step of any torch optimizer costs. It is 1, unless the optimizer says
    otherwise.

    SAM costs 2, or 5/4 with `ascent_fraction=0.25`. `MergOPT(worst_of=n)` costs n + 1.
    """
    return Fraction(getattr(unwrap(optimizer), "gradient_evaluations", 1))


def unwrap(optimizer: Any) -> Any:
    """The optimizer inside wrappers with an attribute `optimizer`, such as accelerate's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def refuse_accumulation(optimizer: Any, micro_batches: int) -> None:
    """Raise `InputError` if a training loop accumulates gradients that `optimizer` does not use.

    Some loops, such as Lightning's, call `step` with a closure over only the last micro-batch. An optimizer
    that evaluates its closure more than once per step cannot evaluate the others again.

    Args:
        optimizer: any torch optimizer, or accelerate's wrapper of one.
        micro_batches: number of micro-batches between two steps, ≥ 1.
    """
    optimizer = unwrap(optimizer)
    evaluations = getattr(optimizer, "evaluations_per_step", 1)
    if micro_batches > 1 and evaluations > 1:
        name = type(optimizer).__name__
        raise InputError(
            f"{name} evaluates its batch {evaluations} times per step and would see only the last of "
            f"{micro_batches} accumulated micro-batches: set accumulate_grad_batches to 1 with a batch "
            f"{micro_batches} times as large, or write the loop over the micro-batches into the closure"
        )
