"""Task arithmetic: a scaled sum of task vectors.

Ilharco et al. 2023, "Editing models with task arithmetic"; reference: mlfoundations/task_vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import ScaledMethod, Site, is_finite
from mergekit_lab.ranges import require


@dataclass(frozen=True, kw_only=True)
class TaskArithmetic(ScaledMethod):
    """`θ0 + α Σ λ_t δ_t`.

    Args:
        coefficient: `α`, or a list of `α_t`, one per expert, instead of `weights`.
            Negative values forget. Limits: 0 is the base bit for bit; one expert at 1 is that expert.
        weights: `λ_t`, 1 by default.
    """

    coefficient: float | Sequence[float] = 0.3  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.coefficient, Sequence):
            finite = all(map(is_finite, self.coefficient))
            require(finite, "coefficient", self.coefficient, "finite in float32")
            if self.weights is not None:
                raise InputError("give either a list of coefficients or weights, not both")

    elementwise = True
    propagates = True
    pools = True

    @property
    def scale(self) -> float:
        return 1.0 if isinstance(self.coefficient, Sequence) else self.coefficient

    def with_coefficient(self, coefficient: float) -> Self:
        if isinstance(self.coefficient, Sequence):
            raise InputError("a list of coefficients cannot be searched; set weights and one coefficient")
        return replace(self, coefficient=coefficient)

    def weigh_experts(self, experts: Sequence[str], name: str = "") -> list[float]:
        if isinstance(self.coefficient, Sequence):
            return replace(self, coefficient=1.0, weights=tuple(self.coefficient)).weigh_experts(experts, name)
        return super().weigh_experts(experts, name)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        return site.weights @ deltas
