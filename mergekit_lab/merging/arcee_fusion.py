"""Arcee Fusion: take the second expert's most important entries, and the first's for the rest.

Arcee 2025, "Meet mergekit v0.1"; arcee-ai/mergekit's `arcee_fusion`. An entry's importance is `|θ_2 − θ_1|`
times the divergence `KL(softmax θ_2 ‖ softmax θ_1)` of its row. Entries above the outlier bound of the tensor,
the median plus 1.5 times the distance between the quartiles, are the second's, all others the first's. mergekit
draws a million entries at random for the quartiles of larger tensors; here they are those of all entries. Its
two models are its base and another; here they are the two experts, as for SLERP.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Method, Site

_FLOOR = 1e-8
_SPREAD = 1.5


@dataclass(frozen=True, kw_only=True)
class ArceeFusion(Method):
    """The first expert, with the second's entries where those are important. Rows are along the last dimension.

    Args:
        weights: None; importance decides.

    The order of the experts matters.
    """

    by_matrix = True
    fewest = most = 2
    without_weights = "importance decides"

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        apart = deltas[1] - deltas[0]
        importance = _diverge(base + deltas[1], base + deltas[0]) * apart.abs()
        important = importance >= find_outlier_bound(importance)
        return apart.mul_(important).add_(deltas[0])


def find_outlier_bound(values: Tensor) -> Tensor:
    """The median plus 1.5 times the distance between the quartiles, each the entry next below; 0-d."""
    ranked = values.reshape(-1).sort().values
    first, median, third = (ranked[int(torch.tensor(share) * (len(ranked) - 1))] for share in (0.25, 0.5, 0.75))
    return median + _SPREAD * (third - first)


def _diverge(second: Tensor, first: Tensor) -> Tensor:
    """`KL(softmax second ‖ softmax first)` of each row, `[…, 1]`; both floored by 1e-8."""
    p, q = (x.softmax(dim=-1).add_(_FLOOR) for x in (second, first))
    return torch.div(p, q, out=q).log_().mul_(p).sum(dim=-1, keepdim=True)
