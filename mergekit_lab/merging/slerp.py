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
from mergekit_lab.merging.contract import Blocks, Method, Site
from mergekit_lab.merging.model_stock import multiply
from mergekit_lab.ranges import require

_PARALLEL = 0.9995
_NO_DIRECTION = 1e-8


@dataclass(frozen=True, kw_only=True)
class SLERP(Method):
    """From the first of two experts to the second along the arc between them.

    Args:
        t: position on the arc, in [0, 1]; 0 is the first expert, 1 the second.
        weights: None; `t` takes their place.

    The order of the experts matters: `t` for one order is `1 − t` for the other.

    Raises:
        InputError: a value out of range; at the merge, not exactly two experts.
    """

    t: float = 0.5

    elementwise = True
    propagates = True

    def __post_init__(self) -> None:
        require(0 <= self.t <= 1, "t", self.t, "in [0, 1]")
        require(self.weights is None, "weights", self.weights, "None: t says how much of each")

    def weigh_experts(self, experts: Sequence[str], name: str = "") -> list[float]:
        if len(experts) != 2:
            raise InputError(f"SLERP goes from one expert to another; it was given {len(experts)}")
        return super().weigh_experts(experts, name)

    def survey_tensor(self, name: str, entries: int, blocks: Blocks) -> tuple[float, float]:
        """How much of each expert makes the point on the arc."""
        gram = sum(multiply(base + deltas) for base, deltas, _ in blocks())
        assert isinstance(gram, Tensor)
        return split_arc(gram.tolist(), self.t)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        first, second = site.tensor
        return first * deltas[0] + second * deltas[1] + (first + second - 1) * base


def split_arc(gram: Sequence[Sequence[float]], t: float) -> tuple[float, float]:
    """How much of two vectors makes the point at `t` on the arc between them, from their products `[2][2]`."""
    if not all(math.isfinite(product) for row in gram for product in row):
        return math.nan, math.nan  # no arc, and the driver refuses a result that is no number
    norms = [math.sqrt(gram[i][i]) for i in range(2)]
    cosine = gram[0][1]
    for norm in norms:
        cosine /= norm if norm > _NO_DIRECTION else 1.0
    cosine = max(-1.0, min(1.0, cosine))
    if abs(cosine) > _PARALLEL:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
