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

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_lab.merging.blocks import cut_rows
from mergekit_lab.merging.contract import Blocks, Method, Site

_SINGULAR = 1e-6


@dataclass(frozen=True, kw_only=True)
class ModelStock(Method):
    """`θ0 + r·mean(δ)`, `r = N cos θ / (1 + (N−1) cos θ)` a tensor.

    Args:
        filter_wise: one angle per output of a matrix or kernel, instead of one per tensor; a vector has one.
        weights: None; the experts count equally.

    Orthogonal task vectors leave the base, equal ones give the expert. Opposing ones (cos θ < 0) move away
    from the mean, as in mergekit; such a tensor's smallest `r` is noted as `ratio`.
    """

    filter_wise: bool = False

    propagates = True
    fewest = 2
    without_weights = "the experts count equally"

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return not self.filter_wise

    @property
    def by_matrix(self) -> bool:  # type: ignore[override]
        return self.filter_wise

    def survey_tensor(self, name: str, entries: int, blocks: Blocks) -> Tensor:
        """`r` of the tensor, 0-d."""
        gram = torch.zeros(())
        for _, deltas, site in blocks():  # noqa: B007
            gram = gram + multiply(deltas)
        ratio = find_ratio(gram)
        _note(site, ratio)
        return ratio

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        if not self.filter_wise:
            return deltas.mean(dim=0).mul_(site.tensor)
        deltas = site.orient(deltas)
        filters = deltas.reshape(len(deltas), deltas.shape[1] if base.dim() > 1 else 1, -1)
        merged, ratios = filters.mean(dim=0), []
        for part in cut_rows(filters.shape[1], filters.shape[2], filters.device):
            ratios.append(find_ratio(multiply(filters[:, part].transpose(0, 1))))
            merged[part] *= ratios[-1][:, None].to(merged.dtype)
        _note(site, torch.cat(ratios).min())
        return site.orient(merged.view(deltas.shape[1:]))


def _note(site: Site, ratio: Tensor) -> None:
    if float(ratio) < 0:
        site.note("ratio", float(ratio))


def multiply(rows: Tensor) -> Tensor:
    """The products of rows with each other, `[…, N, N]` in float64, of `[…, N, n]`."""
    rows = rows.double()
    return rows @ rows.mT


def find_ratio(gram: Tensor) -> Tensor:
    """`r` `[…]` from the products `[…, N, N]` of `N ≥ 2` experts' task vectors with each other."""
    experts = gram.shape[-1]
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    norms = torch.where(norms == 0, 1, norms)
    cosines = (gram / norms[..., None] / norms[..., None, :]).clamp(-1, 1)
    first, second = torch.tril_indices(experts, experts, offset=-1)
    return compute_ratio(cosines[..., first, second].mean(dim=-1), experts)


def compute_ratio(cosine: Tensor, experts: int) -> Tensor:
    """`r = N cos θ / (1 + (N−1) cos θ)`; 0 where the denominator is."""
    below = 1 + (experts - 1) * cosine
    singular = below.abs() < _SINGULAR
    return torch.where(singular, 0, experts * cosine / torch.where(singular, 1, below))
