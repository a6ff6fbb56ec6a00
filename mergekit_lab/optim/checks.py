"""Checks with messages that name the parameter, its value and its range, or the change a loop needs."""

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from mergekit_lab.errors import InputError, suggest
from mergekit_lab.ranges import FASTEST

_LARGEST = 2**63 - 1
"""Whole numbers beyond it are none to torch."""


def require_number(name: str, value: Any, minimum: float = -math.inf, maximum: float = math.inf) -> None:
    """Raise `InputError` unless `value` is in [`minimum`, `maximum`] and fits into float32, or into 64 bits if
    it is a whole number.
    """
    ends = {"least": minimum, "most": maximum}
    bounds = [f"{word} {end:g}" for word, end in ends.items() if math.isfinite(end)]
    bound = f" of at {' and at '.join(bounds)}" if bounds else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name}={value!r} is a {type(value).__name__}; it must be a finite number{bound}")
    largest = _LARGEST if isinstance(value, int) else FASTEST
    if not (abs(value) <= largest and minimum <= value <= maximum):
        size = "" if abs(value) <= largest else f", no larger than {largest:g}"
        raise InputError(f"{name}={str(value)[:40]} is out of range; it must be a finite number{bound}{size}")


def require_integer(name: str, value: Any, minimum: float = -math.inf) -> None:
    """Raise `InputError` unless `value` is an integer, at least `minimum`."""
    require_number(name, value, minimum)
    if not isinstance(value, int):
        raise InputError(f"{name}={value!r} must be a whole number")


def require_known(name: str, value: str, known: Iterable[str]) -> None:
    """Raise `InputError`, with the nearest valid name, unless `value` is one of `known`."""
    options = tuple(known)
    if value not in options:
        way_out = suggest(str(value), options)
        raise InputError(f"{name}={value!r} is not one of {', '.join(options)}{way_out}")


def require_flag(name: str, value: Any) -> None:
    """Raise `InputError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={value!r} is a {type(value).__name__}; it must be true or false")


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
