"""NuSLERP: spherical interpolation between two experts by their weights, of whole tensors or of rows.

arcee-ai/mergekit's `nuslerp`: the position on the arc is `t = λ_2 / (λ_1 + λ_2)`, and with a base the arc is
between the task vectors (`task_vectors`). Unlike SLERP it stays on the arc until the two are parallel to the
precision of float32; they, and opposite ones, are interpolated linearly. Vectors shorter than 1e-7 have no
direction: theirs is taken for orthogonal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Site
from mergekit_lab.merging.slerp import split_arc
from mergekit_lab.merging.sphere import SphericalMethod

_ROUNDING = 2.0**-24
_SHORT = 1e-7
_NO_WEIGHT = 1e-6


@dataclass(frozen=True, kw_only=True)
class NuSLERP(SphericalMethod):
    """Along the arc between two experts, or between their task vectors.

    Args:
        along: what is a vector: `"tensor"`, all of it; `"last"`, its entries along the last dimension (a row of
            a matrix); `"first"`, along the first (a column).
        task_vectors: interpolate the task vectors, and add the base.
        weights: `λ_t`; the position is the second's share of their sum, ½ by default and where the sum is 0.
    """

    along: Literal["tensor", "last", "first"] = "tensor"
    task_vectors: bool = True

    fewest = most = 2

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return self.along == "tensor"

    def find_shares(self, name: str, gram: Tensor, weights: Tensor) -> Sequence[float]:
        t = _find_position(weights)
        first, second = gram.diagonal().sqrt().clamp(min=_SHORT).tolist()
        cosine = max(-1.0, min(1.0, float(gram[0, 1]) / first / second))
        return (1 - t, t) if 1 - cosine**2 <= _ROUNDING else split_arc(math.acos(cosine), t)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        if self.elementwise:
            return super().merge(name, base, deltas, site)
        t = _find_position(site.weights)
        first, second = deltas if self.task_vectors else deltas + base
        dim = 0 if self.along == "first" and base.dim() else -1
        norms = [x.norm(dim=dim, keepdim=True).clamp_(min=_SHORT) for x in (first, second)]
        cosine = ((first / norms[0]) * (second / norms[1])).sum(dim=dim, keepdim=True).clamp_(-1, 1)
        linear = 1 - cosine.square() <= _ROUNDING
        angle = torch.where(linear, 0, cosine).acos_()
        shares = [
            torch.where(linear, part, (part * angle).sin() / angle.sin()).to(base.dtype) for part in (1 - t, t)
        ]
        merged = shares[0] * first + shares[1] * second
        return merged if self.task_vectors else merged - base


def _find_position(weights: Tensor) -> float:
    first, second = weights.tolist()
    return 0.5 if abs(first + second) < _NO_WEIGHT else float(second / (first + second))
