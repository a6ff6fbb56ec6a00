"""DELLA: drop entries of every task vector at random, small ones more often, rescale the rest, merge.

Deep et al. 2024, "DELLA-Merging", section 3 (MagPrune); reference: declare-lab/della. In each row of a
tensor an entry of magnitude rank i of n stays with probability `density − ε + 2ε·i/(n−1)`, and survivors are
divided by it, so that E[DELLA] is the inner method. `epsilon` is half the paper's window. arcee-ai/mergekit
gives every tensor its old L1 norm back instead: `rescale="l1"`; its `della` merges with
`TIES(preset="mergekit", density=1.0)` and its `della_linear` with `TaskArithmetic`.

A vector is one row; a kernel `[out, in, …]` has one row per output channel (mergekit ranks along dimension 1
alone). In a row of one entry, where both codes divide 0 by 0, it stays with probability `density`. The masks
are those of `DARE`, counted by (seed, expert, tensor, flat index): `epsilon=0` is DARE.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mergekit_lab.merging.blocks import cut_rows
from mergekit_lab.merging.contract import Method, Segment, Site
from mergekit_lab.merging.dropping import draw_uniform, make_counters, restore_norm
from mergekit_lab.merging.sparsified import SparsifiedMethod
from mergekit_lab.merging.ties import TIES
from mergekit_lab.ranges import Share, require


@dataclass(frozen=True, kw_only=True)
class DELLA(SparsifiedMethod):
    """Drop by rank of magnitude and rescale, then `inner`.

    Args:
        density: mean share of entries to keep, in (0, 1]; 1 is the inner method.
        epsilon: half the window of probabilities, ≥ 0; `density ± epsilon` must lie within (0, 1) unless
            the density is 1.
        seed: draws the masks.
        rescale: `"inverse"` (the paper) or `"l1"` (mergekit).
        inner: the method that merges what is left; by default the mean of entries that agree with an elected
            sign.
    """

    density: Share = 0.7
    epsilon: float = 0.07
    seed: int = 0
    rescale: Literal["inverse", "l1"] = "inverse"
    inner: Method = field(default_factory=lambda: TIES(preset="mergekit", density=1.0))

    by_matrix = True

    def __post_init__(self) -> None:
        super().__post_init__()
        room = min(self.density, 1 - self.density) if self.density < 1 else float("inf")
        rule = f"at least 0 and below {room:g}, so that density ± epsilon stays within (0, 1)"
        require(0 <= self.epsilon < room, "epsilon", self.epsilon, rule)

    def sparsify(self, name: str, deltas: Tensor, site: Site) -> Tensor:
        if self.density == 1:
            return deltas
        out = torch.empty_like(deltas)
        for expert, delta, row in zip(site.experts, deltas, out, strict=True):
            keep = torch.empty_like(delta, dtype=torch.bool)
            for part, segment in _cut_rows(name, delta):
                stay = assign_probabilities(delta[part], self.density, self.epsilon)
                drawn = draw_uniform(make_counters(self.seed, expert, [segment]), delta.device)
                torch.ge(drawn.view_as(stay), 1 - stay, out=keep[part])
                if self.rescale == "inverse":
                    row[part] = torch.where(keep[part], delta[part] / stay.to(delta.dtype), 0)
            if self.rescale == "l1":
                row.copy_(restore_norm(delta, keep))
        return out


def _cut_rows(name: str, delta: Tensor) -> Iterator[tuple[Any, Segment]]:
    """Some rows of a tensor, and which of its entries these are; of a vector, or a number, it is all."""
    if delta.dim() < 2:
        yield ..., Segment(name, 0, delta.numel())
        return
    size = delta[0].numel()
    for part in cut_rows(len(delta), size, delta.device):
        yield part, Segment(name, part.start * size, part.stop * size)


def assign_probabilities(delta: Tensor, density: float, epsilon: float) -> Tensor:
    """The probability that each entry stays, float64, from its rank of magnitude within its row.

    Args:
        delta: one expert's task vector of one tensor, any shape.
        density: their mean, in (0, 1).
        epsilon: half the distance of the smallest entry's from the largest's. Of equal magnitudes the
            lowest index ranks lowest.
    """
    rows = delta.abs().reshape(delta.shape[0] if delta.dim() > 1 else 1, -1)
    last = rows.shape[1] - 1
    if last <= 0:
        return torch.full_like(delta, density, dtype=torch.float64)
    order = rows.argsort(dim=1, stable=True)
    ranks = torch.empty_like(rows, dtype=torch.float64)
    ranks.scatter_(1, order, torch.arange(last + 1, dtype=ranks.dtype, device=ranks.device).expand_as(ranks))
    return (density - epsilon + ranks / last * (2 * epsilon)).view(delta.shape)
