"""The base of the methods that move along great circles: every tensor is a vector, the result a sum of them.

Only their products are needed, one `T×T` matrix per tensor. So two passes over blocks are enough, and memory is
that of entry-by-entry methods.

Legend: `T` experts, `x_t` what is interpolated of a tensor: the experts `θ_t`, or their task vectors `δ_t`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Blocks, Method, Site
from mergekit_lab.merging.model_stock import multiply


@dataclass(frozen=True, kw_only=True)
class SphericalMethod(Method):
    """`Σ c_t x_t`, with shares `c` from the products of the `x_t`.

    Args:
        task_vectors: whether the `x_t` are the task vectors, and the sum is added to the base; else they are
            the experts themselves, and `θ0` is only what they started from.
    """

    task_vectors: bool = False

    elementwise = True
    propagates = True

    def find_shares(self, name: str, gram: Tensor, weights: Tensor) -> Sequence[float]:
        """`c` of a tensor.

        Args:
            name: the tensor's.
            gram: `x_s·x_t`, `[T, T]` in float64, finite.
            weights: `λ`, `[T]` in float64.
        """
        raise NotImplementedError

    def survey_tensor(self, name: str, entries: int, blocks: Blocks) -> Sequence[float]:
        gram = torch.zeros(())
        for base, deltas, site in blocks():  # noqa: B007
            gram = gram + multiply(deltas if self.task_vectors else base + deltas)
        gram = gram.cpu()
        if not bool(gram.isfinite().all()):
            return [math.nan] * len(gram)  # no angles, and the driver refuses a result that is no number
        return self.find_shares(name, gram, site.weights.double().cpu())

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        shares: Sequence[float] = site.tensor
        merged = torch.zeros_like(base)
        for share, delta in zip(shares, deltas, strict=True):
            merged.add_(delta, alpha=share)
        return merged if self.task_vectors else merged.add_(base, alpha=math.fsum([*shares, -1.0]))
