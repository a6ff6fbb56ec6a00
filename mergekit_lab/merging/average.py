"""Weight average: the mean of the experts.

Wortsman et al. 2022, "Model soups". With `weights`, the weighted mean `Σ λ_t θ_t / Σ λ_t`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Method, Site


@dataclass(frozen=True, kw_only=True)
class WeightAverage(Method):
    """`θ0 + Σ λ_t δ_t / Σ λ_t`; equal weights by default.

    Raises:
        InputError: the weights sum to zero.
    """

    @property
    def elementwise(self) -> bool:
        return True

    @property
    def propagates(self) -> bool:
        return True

    @property
    def pools(self) -> bool:
        return True

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        total = site.weights.sum()
        if total == 0:
            raise InputError("the weights of a weight average sum to zero")
        return (site.weights / total) @ deltas
