"""Passthrough: one expert as it is, or times a factor.

arcee-ai/mergekit's `passthrough`: what layers are stacked by, and models are taken apart with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Method, Site, is_finite
from mergekit_lab.ranges import require


@dataclass(frozen=True, kw_only=True)
class Passthrough(Method):
    """`f·θ_1`.

    Args:
        factor: `f`, finite; multiplies every entry.
        weights: None.

    Raises:
        InputError: a value out of range; at the merge, more than one expert.
    """

    factor: float = 1.0

    elementwise = True
    propagates = True
    pools = True

    def __post_init__(self) -> None:
        require(is_finite(self.factor), "factor", self.factor, "finite in float32")
        require(self.weights is None, "weights", self.weights, "None: factor takes their place")

    def weigh_experts(self, experts: Sequence[str], name: str = "") -> list[float]:
        if len(experts) != 1:
            raise InputError(f"Passthrough takes exactly one expert, not {len(experts)}")
        return super().weigh_experts(experts, name)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        return deltas[0] if self.factor == 1 else (self.factor * deltas[0]).add_(base, alpha=self.factor - 1)
