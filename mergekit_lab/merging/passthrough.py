"""Passthrough: one expert as it is, or times a factor.

arcee-ai/mergekit's `passthrough`: what layers are stacked by, and models are taken apart with.
"""

from dataclasses import dataclass

from torch import Tensor

from mergekit_lab.merging.contract import Method, Site


@dataclass(frozen=True, kw_only=True)
class Passthrough(Method):
    """`f·θ_1`.

    Args:
        factor: `f`, finite; multiplies every entry.
        weights: None.
    """

    factor: float = 1.0

    elementwise = True
    propagates = True
    pools = True
    fewest = most = 1
    without_weights = "factor takes their place"

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        return deltas[0] if self.factor == 1 else (self.factor * deltas[0]).add_(base, alpha=self.factor - 1)
