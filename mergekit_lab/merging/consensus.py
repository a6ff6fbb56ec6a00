"""Consensus task arithmetic: of the summed task vectors, keep what several experts use.

Wang et al. 2024, "Localizing task information for improved model merging and compression", sections 4 and 5.
The TALL mask of expert t marks the entries where the multi-task vector `τ = Σ δ_t` brings the model nearer
to that expert than the base is: `|δ_t| > μ_t |τ − δ_t|`. Entries that fewer than `k` masks mark, selfish (1)
or catastrophic (0) ones, are set back to the base.

Reference: nik-dim/tall_masks (`src/utils/tallmask_utils.py`), which compares the weights themselves,
`|θ0 − θ_t|` with `|θ0 + τ − θ_t|`: the same up to rounding. It picks each task's μ_t on validation from
0.2, 0.3, … 0.6; here they are given. Its `k` of 0, plain task arithmetic, is accepted; a `k` above the number
of experts, which gives it the base, is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Method, ScaledMethod, Site, is_finite
from mergekit_lab.ranges import Natural, require


@dataclass(frozen=True, kw_only=True)
class ConsensusTA(ScaledMethod):
    """`θ0 + α·(Σ λ_t δ_t) ∘ [at least k TALL masks]`.

    Args:
        k: how many masks must mark an entry, 0 to the number of experts; 0 is task arithmetic.
        tall: the masks' `μ_t ≥ 0`: one number, or one per expert, in their order or by name. A larger one
            marks fewer entries.
        coefficient: `α`; the masks do not depend on it.
        weights: `λ_t` in the multi-task vector, 1 by default.

    Raises:
        InputError: a value out of range; at the merge, a `k` above the number of experts, or `tall` of
            other experts.
    """

    k: Natural = 2
    tall: float | Sequence[float] | Mapping[str, float] = 0.4
    coefficient: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.tall, Mapping):
            values = list(self.tall.values())
        else:
            values = list(self.tall) if isinstance(self.tall, Sequence) else [self.tall]
        fits = all(value >= 0 and is_finite(value) for value in values)
        require(fits, "tall", self.tall, "at least 0, and finite in float32")

    elementwise = True
    propagates = True

    def weigh_experts(self, experts: Sequence[str], name: str = "") -> list[float]:
        if self.k > len(experts):
            raise InputError(
                f"k is {self.k}, but only {len(experts)} experts have masks that could agree: lower k"
            )
        self._resolve_thresholds(experts, name)
        return super().weigh_experts(experts, name)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        total = site.weights @ deltas
        thresholds = deltas.new_tensor(self._resolve_thresholds(site.experts, name))[:, None]
        masks = deltas.abs() > thresholds * (total - deltas).abs()
        return total * (masks.sum(dim=0) >= self.k)

    def _resolve_thresholds(self, experts: Sequence[str], name: str) -> list[float]:
        if isinstance(self.tall, Mapping | Sequence):
            try:
                return Method(weights=self.tall).weigh_experts(experts, name)
            except InputError as error:
                raise InputError(f"tall: {error}") from None
        return [self.tall] * len(experts)
