"""NearSwap: take the second expert where it is near the first.

alchemonaut's QuartetAnemoi-70B; arcee-ai/mergekit's `nearswap`. An entry moves towards the second by the share
`min(1, t / |θ_2 − θ_1|)`, so by no more than `t`: differences up to `t` are taken over, larger ones are cut to
it. mergekit's two models are its base and another; here they are the two experts, as for SLERP.
"""

from dataclasses import dataclass

from torch import Tensor

from mergekit_lab.merging.contract import Method, Site
from mergekit_lab.ranges import Magnitude

_NONE = 1e-6


@dataclass(frozen=True, kw_only=True)
class NearSwap(Method):
    """`θ_1 + min(1, t/|θ_2 − θ_1|)·(θ_2 − θ_1)`, entry by entry.

    Args:
        t: how far an entry moves at most, at least 0. Differences under 1e-6 count as 1e-6, as in mergekit.
        weights: None; `t` takes their place.

    The order of the experts matters.
    """

    t: Magnitude = 1e-4

    elementwise = True
    propagates = True
    pools = True
    fewest = most = 2
    without_weights = "t says how much of the second"

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        apart = deltas[1] - deltas[0]
        share = (self.t / apart.abs().clamp_(min=_NONE)).clamp_(max=1)
        return share.mul_(apart).add_(deltas[0])
