"""Multi-SLERP: a weighted mean of directions, at the mean length.

arcee-ai/mergekit's `multislerp` (Goddard, "Multi-SLERP"): the vectors are brought to length 1, projected onto
the tangent space at their weighted mean, averaged there with the same weights and projected back. That average
is the point where the tangent space touches, so the result has the direction of the weighted mean of the unit
vectors and the weighted mean of their lengths: this is what runs here, without the detour.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mergekit_lab.merging.sphere import SphericalMethod
from mergekit_lab.ranges import Positive

_CANCELED = 1e-4
"""Dividing by a shorter mean of directions would enlarge what the sum of vectors loses in single precision."""


@dataclass(frozen=True, kw_only=True)
class MultiSLERP(SphericalMethod):
    """`Σ λ_t ‖x_t‖` times the direction of `Σ λ_t x_t/‖x_t‖`, tensor by tensor.

    Args:
        normalize: divide the weights by their sum.
        epsilon: positive; added to lengths. A mean of directions below it, or below 1e-4, is none.
        task_vectors: interpolate the task vectors, and add the base.
        weights: `λ_t`, 1 by default.

    Vectors whose directions cancel are averaged; mergekit does so for two, and refuses more.
    """

    normalize: bool = True
    epsilon: Positive = 1e-8
    task_vectors: bool = True

    def find_shares(self, name: str, gram: Tensor, weights: Tensor) -> Sequence[float]:
        if len(weights) == 1:
            return [1.0]
        shares = weights / weights.sum() if self.normalize else weights
        lengths = gram.diagonal().sqrt()
        units = shares / (lengths + self.epsilon)
        mean = float((units @ gram @ units).clamp(min=0).sqrt())
        if mean >= max(self.epsilon, _CANCELED):
            shares = units * float(shares @ lengths) / mean
        return [float(share) for share in shares]
