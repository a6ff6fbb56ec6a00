"""One coefficient for the whole model, chosen on validation.

A different coefficient for each target task would not be one multi-task model, so there is none here. The
criterion is the mean over tasks of accuracy divided by the expert's accuracy on that same split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mergekit_lab.errors import InputError


@dataclass(frozen=True)
class Candidate:
    """One point of the curve.

    Attributes:
        coefficient: `α`.
        values: accuracy in [0, 1] by task.
        normalised: the criterion.
    """

    coefficient: float
    values: Mapping[str, float]
    normalised: float


def normalised(values: Mapping[str, float], expert_values: Mapping[str, float]) -> float:
    """Mean over tasks of `value / expert's value`.

    Raises:
        InputError: an expert's value is zero, so that nothing can be measured against it.
    """
    dead = [task for task, value in expert_values.items() if value == 0]
    if dead:
        raise InputError(f"the experts of {', '.join(dead)} score 0, so no accuracy can be divided by theirs")
    return sum(values[task] / expert_values[task] for task in values) / len(values)


def best_candidate(curve: Sequence[Candidate]) -> Candidate:
    """The candidate of the highest criterion; of equals, the one nearest to the base."""
    return max(curve, key=lambda c: (c.normalised, -abs(c.coefficient)))
