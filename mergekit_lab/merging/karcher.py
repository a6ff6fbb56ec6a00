"""Karcher mean: the point on the sphere whose squared arcs to the experts' directions have the least sum.

Karcher 1977, "Riemannian center of mass"; for weights "Functionality-oriented LLM merging on the Fisher-Rao
manifold" (2026) and arcee-ai/mergekit, whose stopping rules run here: gradient steps of length 1 from the
normalized weighted mean, until the mean tangent is shorter than `tolerance`. The result has the weighted mean
of the lengths. All iterates are sums of the experts' directions, so they are computed from the products of the
experts, in float64, and no pass over the tensor is made for them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_lab.merging.sphere import SphericalMethod
from mergekit_lab.ranges import Natural, Rate

_OPPOSITE = 1e-5
"""An expert this near to the mean's opposite pulls nowhere: the direction that its cosine has is rounding."""


@dataclass(frozen=True, kw_only=True)
class Karcher(SphericalMethod):
    """`Σ λ_t ‖x_t‖ / Σ λ_t` times the Karcher mean of the directions `x_t/‖x_t‖`, tensor by tensor.

    Args:
        steps: largest number of iterations, at least 0; 0 is the normalized weighted mean.
        tolerance: positive; a shorter arc counts as zero, and a shorter vector has no direction.
        task_vectors: take the mean of the task vectors, and add the base.
        weights: `λ_t ≥ 0`, 1 by default.
    """

    steps: Natural = 10
    tolerance: Rate = 1e-5

    signed = False

    def find_shares(self, name: str, gram: Tensor, weights: Tensor) -> Sequence[float]:
        shares, lengths = weights / weights.sum(), gram.diagonal().sqrt()
        if len(shares) == 1:
            return [1.0]
        pointed = lengths > self.tolerance
        if not bool((pointed & (shares > 0)).any()):
            return [0.0] * len(shares)
        inverse = torch.where(pointed, 1 / torch.where(pointed, lengths, 1), 0)
        cosines = gram * inverse * inverse[:, None]
        mean = self._find_mean(cosines, torch.where(pointed, shares, 0))
        return [float(share) for share in mean * inverse * float(shares @ lengths)]

    def _find_mean(self, cosines: Tensor, shares: Tensor) -> Tensor:
        """The mean as a sum of directions `[T]`, from their cosines `[T, T]`."""
        shares = shares / shares.sum()

        def measure(vector: Tensor) -> float:
            return float((vector @ cosines @ vector).clamp(min=0).sqrt())

        first = torch.zeros_like(shares)
        first[int((shares > 0).nonzero()[0])] = 1
        length = measure(shares)
        mean = first if length < self.tolerance else shares / length
        for _ in range(self.steps):
            arcs = (cosines @ mean).clamp(-1, 1)
            angles = arcs.acos()
            is_idle = (angles < self.tolerance) | (math.pi - angles < _OPPOSITE)
            pull = torch.where(is_idle, 0, shares * angles / angles.sin())
            tangent = pull - (pull @ arcs) * mean
            length = measure(tangent)
            if length < self.tolerance:
                break
            mean = torch.cos(mean.new_tensor(length)) * mean + torch.sin(mean.new_tensor(length)) * (
                tangent / length
            )
            norm = measure(mean)
            mean = mean / norm if norm > self.tolerance else mean
        return mean
