"""SCE: select the entries on which experts differ most, weigh experts by their energy, erase minority signs.

Wan et al. 2024, "FuseChat: knowledge fusion of chat models", section 3.3. Of each tensor: Select keeps the
positions of largest variance over the experts, the share `density` of those that vary at all (τ in the paper);
Calculate weighs expert t by the mean square of what is left of its task vector; Erase drops entries against the
sign of the sum, as TIES elects it. What agrees is averaged by these weights.

`preset="mergekit"` is arcee-ai/mergekit's `sce`: experts count equally in a tensor where their mean squares sum
to less than 1e-6, which in fine-tuned language models is nearly every one, and the mean's divisor is at least
1e-6. `"paper"` has no such bounds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Blocks, ScaledMethod, Site
from mergekit_lab.merging.selection import Largest, select_largest
from mergekit_lab.merging.ties import elect
from mergekit_lab.ranges import Share

_NOTHING = 1e-6


@dataclass(frozen=True, kw_only=True)
class SCE(ScaledMethod):
    """`θ0 + α Σ s_t δ_t / Σ s_t` over the experts that agree with the elected sign, `s_t ∝ mean(δ_t²)`.

    Args:
        density: share of the varying positions to keep, in (0, 1]; 1 keeps all.
        preset: `"paper"` or `"mergekit"`.
        coefficient: `α`.
        weights: None; the experts' energies take their place.
    """

    density: Share = 1.0
    preset: Literal["paper", "mergekit"] = "paper"

    elementwise = True
    without_weights = "they follow from the task vectors"

    def survey_tensor(self, name: str, entries: int, blocks: Blocks) -> tuple[Largest | None, Tensor]:
        """The largest variances, and the experts' shares `s` `[T]`."""
        largest = None
        if self.density < 1:

            def vary() -> Iterator[tuple[None, Tensor, None]]:
                return ((None, _compute_variance(deltas), None) for _, deltas, _ in blocks())

            varying = sum(int(variance.count_nonzero()) for _, variance, _ in vary())
            largest = select_largest([vary], int(varying * self.density), entries)
        squares = torch.zeros(())
        for _, deltas, site in blocks():
            kept = self._select(deltas, largest, site.offset)
            squares = squares + kept.square().sum(dim=1, dtype=torch.float64)
        means = squares / entries
        least = _NOTHING if self.preset == "mergekit" else torch.finfo(torch.float64).tiny
        even = means.sum() < least
        return largest, torch.where(even, 1 / len(means), means / torch.where(even, 1, means.sum()))

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        largest, shares = site.tensor
        kept = self._select(deltas, largest, site.offset)
        signs = elect(kept, "mass")
        signs.add_(1 - signs.abs())
        agreeing = (kept.sign() == signs) * shares.to(kept)[:, None]
        total = agreeing.sum(dim=0)
        if self.preset == "mergekit":
            return (kept * agreeing).sum(dim=0).div_(total.clamp_(min=_NOTHING))
        return (kept * agreeing).sum(dim=0).div_(torch.where(total == 0, 1, total))

    def _select(self, deltas: Tensor, largest: Largest | None, offset: int) -> Tensor:
        if largest is None:
            return deltas
        return deltas * largest.trim(_compute_variance(deltas), offset).sign_()


def _compute_variance(deltas: Tensor) -> Tensor:
    """The variance of each position over the experts, `[1, n]`; exactly 0 where they agree."""
    # torch's own over dim 0 takes a CPU thirty times as long
    apart = deltas - deltas[0]
    return apart.sub_(apart.mean(dim=0)).square_().mean(dim=0)[None]
