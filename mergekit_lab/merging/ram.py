"""RAM: keep what only one expert changed, average what several changed.

Yuan et al. 2026, "Behavior knowledge merge in reinforced agentic models": agents trained by reinforcement
learning change few entries, and mostly different ones. An entry counts as changed where `|δ_t| > ε`. RAM+
strengthens what is an expert's own by `λ_t = 1 + r·min(ρ_t, b)`, with `ρ_t` its number of shared entries by
that of its own, to make up for the averaging. The paper counts over the whole model; arcee-ai/mergekit's
`ramplus_tl` tensor by tensor.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Blocks, ScaledMethod, Site, Stream
from mergekit_lab.merging.selection import run_at_once
from mergekit_lab.ranges import Magnitude

_NONE = torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class RAM(ScaledMethod):
    """`θ0 + α(Σ own + mean of shared)`.

    Args:
        epsilon: `ε ≥ 0`; smaller changes count as none.
        boost: `r ≥ 0`, how much an expert's own entries are strengthened; 0 is RAM, RAM+ takes 0.1.
        bound: `b ≥ 0`, the bound on the ratio of shared to own entries.
        scope: what `ρ_t` is counted over: `"model"` (the paper) or `"tensor"` (mergekit).
        coefficient: `α`.
        weights: `λ_t` of what is merged, 1 by default; they do not change what counts as changed.
    """

    epsilon: Magnitude = 1e-5
    boost: Magnitude = 0.0
    bound: Magnitude = 0.2
    scope: Literal["model", "tensor"] = "model"

    elementwise = True

    @property
    def pools(self) -> bool:  # type: ignore[override]
        return self.scope == "model"

    def survey(self, stream: Stream) -> Any:
        if self.boost == 0 or self.scope == "tensor" or not stream.entries:
            return None

        def count(share: Stream) -> Tensor:
            return sum((self._count(deltas).cpu() for _, deltas, _ in share.read_blocks()), _NONE)

        return self._strengthen(sum(run_at_once(count, stream.divide()), _NONE))

    def survey_tensor(self, name: str, entries: int, blocks: Blocks) -> Any:
        if self.boost == 0 or self.scope == "model":
            return None
        return self._strengthen(sum((self._count(deltas) for _, deltas, _ in blocks()), _NONE))

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        changed = deltas.abs() > self.epsilon
        users = changed.sum(dim=0)
        kept = site.weigh(deltas) * changed
        factors = site.survey if self.scope == "model" else site.tensor
        if factors is not None:
            kept = torch.where(users == 1, kept * factors.to(kept)[:, None], kept)
        return kept.sum(dim=0).div_(users.clamp_(min=1))

    def _count(self, deltas: Tensor) -> Tensor:
        """Shared and own entries of each expert, `[2, T]`."""
        changed = deltas.abs() > self.epsilon
        alone = changed.sum(dim=0) == 1
        own = (changed & alone).sum(dim=1)
        return torch.stack([changed.sum(dim=1) - own, own])

    def _strengthen(self, counts: Tensor) -> Tensor:
        """`λ_t` `[T]` from the counts `[2, T]`; an expert whose entries are all shared has the bound's."""
        shared, own = counts.double()
        ratio = torch.where(own > 0, shared / own.clamp(min=1), torch.where(shared > 0, self.bound, 0.0))
        return 1 + self.boost * ratio.clamp(max=self.bound)
