"""Model Stock: the mean of the experts, drawn towards the base by the angle between them.

Jang et al. 2024, "Model Stock: all we need is just a few fine-tuned models", section 4: with `θ` the angle
between task vectors of a layer, the point nearest to the center of the experts on the segment from the base
to their mean is at `N cos θ / (1 + (N−1) cos θ)` for `N` experts. The authors published no code;
arcee-ai/mergekit's arithmetic runs here (cos θ is the mean over all pairs, clamped to [−1, 1], also negative;
the base stays where the denominator is under 1e-6), with two differences: mergekit divides by at least 1e-6
for each pair, which shrinks the cosine of task vectors shorter than 1e-3 and so pulls biases to the base,
ours is the cosine at every length; and `filter_wise` takes an output channel of a kernel as one filter, where
mergekit takes each of its innermost rows, and an output of a Conv1D, stored [in, out], where mergekit takes an
input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Method, Site, require

_SINGULAR = 1e-6


@dataclass(frozen=True, kw_only=True)
class ModelStock(Method):
    """`θ0 + r·mean(δ)`, `r = N cos θ / (1 + (N−1) cos θ)` a tensor.

    Args:
        filter_wise: an angle for each output of a matrix or kernel in place of one for the tensor; a vector
            is one.
        weights: None; the experts count equally.

    Orthogonal task vectors leave the base, equal ones give the expert. Opposing ones (cos θ < 0) move away
    from the mean, as in mergekit; such a tensor's smallest `r` is noted as `ratio`.

    Raises:
        InputError: at the merge, fewer than two experts.
    """

    filter_wise: bool = False

    def __post_init__(self) -> None:
        require(self.weights is None, "weights", self.weights, "None: the experts count equally")

    def expert_weights(self, experts: Sequence[str], name: str = "") -> list[float]:
        if len(experts) < 2:
            raise InputError("model stock measures the angle between experts; it needs at least two")
        return super().expert_weights(experts, name)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        deltas = site.orient(deltas)
        rows = deltas.shape[1] if self.filter_wise and base.dim() > 1 else 1
        filters = deltas.reshape(len(deltas), rows, -1)
        ratio = stock_ratio(filters)
        if float(ratio.min()) < 0:
            site.note("ratio", float(ratio.min()))
        return site.orient((ratio[:, None] * filters.mean(dim=0)).view(deltas.shape[1:]))


def stock_ratio(filters: Tensor) -> Tensor:
    """`r` of each filter `[F]`, from the task vectors `[N, F, n]` of `N ≥ 2` experts."""
    norms = filters.norm(dim=-1, keepdim=True)
    units = filters / torch.where(norms == 0, 1, norms)
    experts = len(filters)
    cosines = [(units[i] * units[j]).sum(dim=-1) for i in range(experts) for j in range(i)]
    cosine = torch.stack(cosines).clamp(-1, 1).mean(dim=0)
    below = 1 + (experts - 1) * cosine
    singular = below.abs() < _SINGULAR
    return torch.where(singular, 0, experts * cosine / torch.where(singular, 1, below))
