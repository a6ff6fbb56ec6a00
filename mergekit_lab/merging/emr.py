"""EMR-Merging: one vector for all tasks, and a mask and a rescaler for each.

Huang et al. 2024, "EMR-Merging: tuning-free high-performance model merging", section 3. Elect: of every entry
the sign of the sum, and the largest of the magnitudes that have it, which is the unified vector `τ`. Mask: the
entries `M_t` where an expert's own sign is that of `τ`. Rescale: `γ_t = Σ|δ_t| / Σ|M_t ∘ τ|`, over the whole
model.

Reference: harveyhuang18/EMR_Merging (`emr_merge`). Its rescalers divide sums of every tensor's mean magnitude:
preset `"authors"`. The paper's formula, over all entries alike, is preset `"paper"`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Method, Site, Stream


@dataclass(frozen=True, kw_only=True)
class EMR(Method):
    """For task `t`: `θ0 + γ_t M_t ∘ τ`.

    `format="per_task"` stores `τ`, all masks in bits and the rescalers, and a run scores each task with its own
    model. A dense merge is `θ0 + τ`.

    Args:
        preset: whose rescalers to use: `"paper"` or `"authors"`.
        weights: `λ_t` scales `δ_t` first; 1 by default.
    """

    preset: Literal["paper", "authors"] = "paper"

    elementwise = True
    by_task: ClassVar[bool] = True

    @property
    def pools(self) -> bool:  # type: ignore[override]
        return self.preset == "paper"

    def unify(self, deltas: Tensor) -> tuple[Tensor, Tensor]:
        """`τ` `[n]` and the masks `[T, n]` of `λ_t δ_t` `[T, n]`."""
        signs = (deltas.sum(dim=0) > 0).to(deltas).mul_(2).sub_(1)
        agreeing = deltas * signs
        return agreeing.amax(dim=0).clamp_(min=0).mul_(signs), agreeing > 0

    def find_rescalers(self, stream: Stream) -> Tensor:
        """`γ` `[T]` in float64; 0 of an expert that is the base."""
        sums: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for name, deltas, site in stream.read_blocks():
            own = site.weigh(deltas)
            shared, masks = self.unify(own)
            magnitudes = torch.stack([own.abs(), shared.abs() * masks]).sum(dim=2, dtype=torch.float64)
            key = name if self.preset == "authors" else ""
            sums[key] = sums.get(key, 0) + magnitudes.cpu()
            counts[key] = counts.get(key, 0) + deltas.shape[1]
        nothing = torch.zeros(2, len(stream.experts), dtype=torch.float64)
        total = sum((sums[key] / counts[key] for key in sums), start=nothing)
        return torch.where(total[1] > 0, total[0] / total[1], 0.0)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        return self.unify(site.weigh(deltas))[0]
