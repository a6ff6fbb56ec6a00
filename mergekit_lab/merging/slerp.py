"""SLERP: spherical interpolation between two models, tensor by tensor.

Shoemake 1985, "Animating rotation with quaternion curves", applied to weights as arcee-ai/mergekit does: each
tensor of both models is one long vector, `θ = sin((1−t)ω)/sin ω · θ_1 + sin(tω)/sin ω · θ_2` with `ω` the
angle between the two; where they are nearly parallel or opposite (|cos ω| > 0.9995) the interpolation is
linear. mergekit's two models are its base and another; here they are the two experts, and `θ0` is only what
both started from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.sphere import SphericalMethod
from mergekit_lab.ranges import require

_PARALLEL = 0.9995
_NO_DIRECTION = 1e-8


@dataclass(frozen=True, kw_only=True)
class SLERP(SphericalMethod):
    """From the first of two experts to the second along the arc between them.

    Args:
        t: position on the arc, in [0, 1]; 0 is the first expert, 1 the second.
        task_vectors: interpolate the task vectors instead of the experts.
        weights: None; `t` takes their place.

    The order of the experts matters: `t` for one order is `1 − t` for the other.

    Raises:
        InputError: a value out of range; at the merge, not exactly two experts.
    """

    t: float = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.t <= 1, "t", self.t, "in [0, 1]")
        require(self.weights is None, "weights", self.weights, "None: t says how much of each")

    def weigh_experts(self, experts: Sequence[str], name: str = "") -> list[float]:
        expect_two(experts, self)
        return super().weigh_experts(experts, name)

    def find_shares(self, name: str, gram: Tensor, weights: Tensor) -> Sequence[float]:
        first, second = (max(norm, 0.0) for norm in gram.diagonal().sqrt().tolist())
        cosine = float(gram[0, 1])
        for norm in (first, second):
            cosine /= norm if norm > _NO_DIRECTION else 1.0
        cosine = max(-1.0, min(1.0, cosine))
        if abs(cosine) > _PARALLEL:
            return 1 - self.t, self.t
        return split_arc(math.acos(cosine), self.t)


def expect_two(experts: Sequence[str], method: object) -> None:
    """Refuse any other number of experts."""
    if len(experts) != 2:
        raise InputError(f"{type(method).__name__} takes exactly two experts, not {len(experts)}")


def split_arc(angle: float, t: float) -> tuple[float, float]:
    """How much of two vectors at this angle makes the point at `t` on the arc between them."""
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
