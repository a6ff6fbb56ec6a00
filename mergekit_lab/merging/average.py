"""Weight average: the mean of the experts.

Wortsman et al. 2022, "Model soups". With `weights`, the weighted mean `Σ λ_t θ_t / Σ λ_t`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Method, Site

_ROUNDING = torch.finfo(torch.float32).eps


@dataclass(frozen=True, kw_only=True)
class WeightAverage(Method):
    """`θ0 + Σ λ_t δ_t / Σ λ_t`; equal weights by default.

    Raises:
        InputError: the weights sum to zero.
    """

    elementwise = True
    propagates = True
    pools = True

    def weigh_experts(self, experts: Sequence[str], name: str = "") -> list[float]:
        weights = super().weigh_experts(experts, name)
        known = name or not self.weights_by_tensor
        if known and abs(math.fsum(weights)) <= _ROUNDING * sum(map(abs, weights)):
            raise InputError(f"the weights of a weight average, {weights}, sum to zero")
        return weights

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        return (site.weights / site.weights.sum()) @ deltas
