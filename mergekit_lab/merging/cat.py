"""CAT Merging: remove from every task vector what changes other tasks' layers, and add up the rest.

Sun et al. 2025, "CAT Merging: a training-free approach for resolving conflicts in model merging", section 4.
Let `X_k` be the inputs of a layer at expert `k`. The top eigenvectors of `Σ_{i≠k} δ_i (X_kᵀX_k − λ X_iᵀX_i)
δ_iᵀ` (weights `[out, in]`) are the output directions in which the other task vectors change expert `k` most,
less `λ` times the change that they make at their own experts. All other task vectors are projected off these
directions. For norms' scales and for biases as many entries are set to 0: those with the largest `Σ_{i≠k}
(E[x_k²] − λ E[x_i²]) δ_i²`, or `Σ_{i≠k} δ_i²`.

The authors' code was not available, so the tests compare with these formulas, written out. Where we differ:
eigenvectors and entries without a conflict (a number that is not positive) are not removed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import ScaledMethod, Site
from mergekit_lab.merging.regmean import name_gram
from mergekit_lab.ranges import Count, Magnitude


@dataclass(frozen=True, kw_only=True)
class CAT(ScaledMethod):
    """`θ0 + α Σ_i Π_{k≠i} (I − B_k B_kᵀ) λ_i δ_i` for weights with a Gram; masks in place of projections for
    scales and biases; the sum for other tensors.

    Args:
        rank: `c`, number of directions or entries removed for every expert, at least 1.
        penalty: the paper's `λ` ≥ 0, the weight of what a task vector does to its own expert.
        coefficient: `α`.
        weights: `λ_i` scales `δ_i` first; 1 by default.

    Needs `statistics={"gram": …}` as `RegMean` does; `curvature.input_grams` makes those of norms, too. The
    projections of several experts are made one after another, in their order.

    Raises:
        InputError: at the merge, a Gram that does not fit its weight.
    """

    rank: Count = 3
    penalty: Magnitude = 1.0

    side_inputs: ClassVar[tuple[str, ...]] = ("gram",)
    by_matrix = True

    def name_side(self, kind: str, name: str) -> str | None:
        return name_gram(name)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        own = site.weigh(deltas)
        grams = site.side.get("gram")
        if base.dim() == 2 and grams is not None:
            weights = site.orient(own)
            inputs = weights.shape[-1]
            if grams.shape[1:] != (inputs, inputs):
                raise InputError(
                    f"the gram of {name!r} is {list(grams.shape[1:])}, and a weight with {inputs} inputs takes "
                    "[in, in]"
                )
            return site.orient(self._project(weights, grams)).to(deltas.dtype)
        if base.dim() == 1 and grams is not None and grams.shape[1:] == base.shape:
            return self._mask(own, grams, self.penalty)
        if base.dim() == 1 and name.endswith("bias"):
            return self._mask(own, torch.ones_like(own), 0.0)
        return own.sum(dim=0)

    def _project(self, deltas: Tensor, grams: Tensor) -> Tensor:
        """Of `[T, out, in]` and Grams `[T, in, in]`: `[out, in]` in float64."""
        total = torch.zeros_like(deltas[0], dtype=torch.float64)
        bases = [self._find_conflicts(k, deltas, grams) for k in range(len(deltas))]
        for i, delta in enumerate(deltas):
            kept = delta.to(torch.float64, copy=True)
            for k in _list_others(i, deltas):
                kept.addmm_(bases[k], bases[k].mT @ kept, alpha=-1)
            total += kept
            del kept
        return total

    def _find_conflicts(self, k: int, deltas: Tensor, grams: Tensor) -> Tensor:
        """`B_k` `[out, c]`, in the span of the others' outputs, which may be fewer than all."""
        outputs, inputs = deltas.shape[1:]
        others = [deltas[i] for i in _list_others(k, deltas)]
        span: Tensor | None = None
        if outputs > inputs * len(others) > 0:
            span, triangle = torch.linalg.qr(torch.cat(others, dim=1).double())
            others = list(triangle.split(inputs, dim=1))
            outputs = len(triangle)
        conflict = torch.zeros(outputs, outputs, dtype=torch.float64, device=deltas.device)
        for i, delta in zip(_list_others(k, deltas), others, strict=True):
            gram = grams[k].double() - self.penalty * grams[i].double()
            wide = delta.double()
            conflict.addmm_(wide @ gram, wide.mT)
            del gram, wide
        values, vectors = torch.linalg.eigh(conflict)
        top = vectors[:, -self.rank :][:, values[-self.rank :] > 0].clone()
        return top if span is None else span @ top

    def _mask(self, deltas: Tensor, squares: Tensor, penalty: float) -> Tensor:
        """Of `[T, n]` and mean squares `[T, n]` of what they multiply: `[n]`."""
        kept = torch.ones_like(deltas)
        for k in range(len(deltas)):
            conflict = torch.zeros_like(deltas[k])
            for i in _list_others(k, deltas):
                conflict += (squares[k] - penalty * squares[i]) * deltas[i].square()
            values, entries = conflict.topk(min(self.rank, len(conflict)))
            for i in _list_others(k, deltas):
                kept[i, entries[values > 0]] = 0
        return (deltas * kept).sum(dim=0)


def _list_others(k: int, deltas: Tensor) -> Iterator[int]:
    return (i for i in range(len(deltas)) if i != k)
