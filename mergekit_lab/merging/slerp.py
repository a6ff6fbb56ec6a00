"""SLERP: spherical interpolation between two models, tensor by tensor.

Shoemake 1985, "Animating rotation with quaternion curves", applied to weights as arcee-ai/mergekit does: each
tensor of both models is one long vector, `θ = sin((1−t)ω)/sin ω · θ_1 + sin(tω)/sin ω · θ_2` with `ω` the
angle between the two; where they are nearly parallel or opposite (|cos ω| > 0.9995) the interpolation is
linear. mergekit's two models are its base and another; here they are the two experts, and `θ0` is only what
both started from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mergekit_lab.merging.sphere import SphericalMethod
from mergekit_lab.ranges import Proportion

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
    """

    t: Proportion = 0.5

    fewest = most = 2
    without_weights = "t says how much of each"

    def find_shares(self, name: str, gram: Tensor, weights: Tensor) -> Sequence[float]:
        first, second = (max(norm, 0.0) for norm in gram.diagonal().sqrt().tolist())
        cosine = float(gram[0, 1])
        for norm in (first, second):
            cosine /= norm if norm > _NO_DIRECTION else 1.0
        cosine = max(-1.0, min(1.0, cosine))
        if abs(cosine) > _PARALLEL:
            return 1 - self.t, self.t
        return split_arc(math.acos(cosine), self.t)


def split_arc(angle: float, t: float) -> tuple[float, float]:
    """How much of two vectors at this angle makes the point at `t` on the arc between them."""
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
