"""Model Breadcrumbs: drop the largest and the smallest entries of every task vector, tensor by tensor.

Davari & Belilovsky 2024, "Model Breadcrumbs", section 3: of each layer's magnitudes both tails are masked,
outliers and negligible changes, and the rest is summed as in task arithmetic. The paper names the quantiles
between which entries stay, β and γ; arcee-ai/mergekit names the share that stays (`density`, γ − β) and the
share dropped at the top (`gamma`, 1 − γ), and its arithmetic runs here. Of equal magnitudes the lowest flat
index counts as the largest; mergekit's order there is unspecified. Its `breadcrumbs_ties` is
`inner=TIES(preset="mergekit", density=1.0)`.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt
from torch import Tensor

from mergekit_lab.merging.contract import Blocks, Site
from mergekit_lab.merging.selection import Largest, Pass, select_each
from mergekit_lab.merging.sparsified import SparsifiedMethod
from mergekit_lab.ranges import Share


@dataclass(frozen=True, kw_only=True)
class Breadcrumbs(SparsifiedMethod):
    """Keep the middle of each tensor's magnitudes, then `inner`.

    Args:
        density: share of entries to keep, in (0, 1]; 1 is the inner method.
        gamma: share of the largest entries to drop, in [0, 1), rounded down; less if `density` leaves no room.
            0 is trimming by magnitude.
        inner: the method that merges what is left, task arithmetic by default.
    """

    density: Share = 0.1
    gamma: Annotated[float, Ge(0), Lt(1)] = 0.01

    by_blocks = True

    def survey_sparsity(self, name: str, entries: int, blocks: Blocks) -> list[Largest]:
        return select_middle(blocks, self.density, self.gamma, entries)

    def sparsify(self, name: str, deltas: Tensor, site: Site) -> Tensor:
        upto, top = site.tensor
        return upto.trim(deltas, site.offset).sub_(top.trim(deltas, site.offset))


def select_middle(blocks: Pass, density: float, gamma: float, entries: int) -> list[Largest]:
    """Two numbers of largest entries; what only the first holds is the middle.

    Of each `δ_t` drop the `int(gamma·n)` largest entries and keep the next `int(density·n)`.

    Args:
        blocks: in flat order.
        density: in (0, 1].
        gamma: in [0, 1).
        entries: how many an expert has over all blocks.
    """
    kept = int(density * entries)
    upto = min(entries, kept + int(gamma * entries))
    return select_each([blocks], [upto, upto - kept], entries)


def keep_middle(deltas: Tensor, density: float, gamma: float) -> Tensor:
    """`select_middle` of whole task vectors `[T, *S]`, with all other entries zero."""
    rows = deltas.reshape(len(deltas), -1)
    upto, top = select_middle(lambda: iter([(None, rows, None)]), density, gamma, rows.shape[1])
    return upto.trim(rows).sub_(top.trim(rows)).view_as(deltas)
