"""PCB-Merging: weigh every entry by how much its expert relies on it, and how well the others go with it.

Du et al. 2024, "Parameter competition balancing for model merging", section 3; reference:
duguodong7/pcb-merging (`pcb-merging.py`), whose arithmetic runs here. Magnitudes are clamped to their quantiles
0.0001 and 0.9999 over the whole model; with `s` their place between the two, in [0, 1], an entry's balance is
`exp(T·s²)·tanh(δ_t·Σδ)`. Of each expert the share `density` of largest balance stays and weighs by its height
above the bound; the merged entry is the mean by these weights. All quantiles are exact, in passes over blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_lab.merging.contract import ScaledMethod, Site, Stream
from mergekit_lab.merging.selection import Largest, select_each, select_largest
from mergekit_lab.ranges import Share

_TAIL = 0.0001
_NO_WEIGHT = 1e-12


@dataclass(frozen=True, kw_only=True)
class PCB(ScaledMethod):
    """`θ0 + α Σ w_t λ_t δ_t / Σ w_t`, entry by entry, with weights `w` by balance over the whole model.

    Args:
        density: share of an expert's entries that count, in (0, 1].
        coefficient: `α`.
        weights: `λ_t` of the clamped task vectors, 1 by default; the authors search them by evolution.
    """

    density: Share = 0.1

    elementwise = True
    pools = True
    most = 88  # exp of more overflows

    def survey(self, stream: Stream) -> tuple[Tensor, ...] | None:
        """Lower and upper bound of magnitudes, and of balances; one number per expert, `[T, 1]`."""
        entries = stream.entries
        if not entries:
            return None
        low, high = _find_bounds(stream, int(entries * _TAIL), int(entries * (1 - _TAIL) - 1), entries)

        def balance(name: str, deltas: Tensor, site: Site) -> Tensor:
            return _balance(deltas, low, high)

        balances = stream.map(balance)
        bound = _find_ranked(balances, int(entries * (1 - self.density)), entries)
        most = torch.full_like(bound, -torch.inf)
        for _, block, _ in balances.read_blocks():
            most = torch.maximum(most, block.amax(dim=1, keepdim=True).to(most))
        return low, high, bound, most

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        low, high, bound, most = (x.to(deltas) for x in site.survey)
        height = (most - bound).where(most > bound, 1)
        weights = _balance(deltas, low, high).sub_(bound).clamp_(min=0).div_(height)
        kept = site.weigh(deltas.sign() * deltas.abs().clamp(low, high))
        return (kept * weights).sum(dim=0).div_(weights.sum(dim=0).clamp_(min=_NO_WEIGHT))


def _find_bounds(stream: Stream, first: int, last: int, entries: int) -> tuple[Tensor, Tensor]:
    """The magnitudes of these ranks from below, `[T, 1]` each."""
    shares = [share.read_blocks for share in stream.divide()]
    kept = [entries - first, entries - last]
    bounds = [_to_column(largest) for largest in select_each(shares, kept, entries, True)]
    if first == 0:
        bounds[0] = _find_smallest(stream.map(lambda name, deltas, site: deltas.abs()))
    return bounds[0], bounds[1]


def _find_smallest(stream: Stream) -> Tensor:
    """`[T, 1]`."""
    smallest = torch.full((len(stream.experts), 1), torch.inf, dtype=torch.float64)
    for _, block, _ in stream.read_blocks():
        smallest = torch.minimum(smallest, block.amin(dim=1, keepdim=True).to(smallest))
    return smallest


def _to_column(largest: Largest) -> Tensor:
    """Its thresholds `[T, 1]`, exact whatever the task vectors' dtype."""
    return torch.tensor(largest.thresholds, dtype=torch.float64)[:, None]


def _find_ranked(stream: Stream, rank: int, entries: int) -> Tensor:
    """The signed entries of this rank from below, `[T, 1]`."""
    if rank == 0:
        return _find_smallest(stream)

    def select(sign: int, kept: int) -> Tensor:
        signed = stream.map(lambda name, deltas, site: deltas.mul(sign).relu_())
        shares = [share.read_blocks for share in signed.divide()]
        return sign * _to_column(select_largest(shares, kept, entries, True))

    positive = negative = torch.zeros((), dtype=torch.int64)
    for _, block, _ in stream.read_blocks():
        positive = positive + (block > 0).sum(dim=1, keepdim=True).cpu()
        negative = negative + (block < 0).sum(dim=1, keepdim=True).cpu()
    above, below = entries - rank <= positive, rank < negative
    bound = torch.zeros(above.shape, dtype=torch.float64)
    if bool(above.any()):
        bound = torch.where(above, select(1, entries - rank), bound)
    if bool(below.any()):
        bound = torch.where(below, select(-1, rank + 1), bound)
    return bound


def _balance(deltas: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`exp(T·s²)·tanh(δ_t·Σδ)`, shaped like `deltas` `[T, n]`."""
    low, high = low.to(deltas), high.to(deltas)
    share = deltas.abs().clamp_(low, high).sub_(low).div_((high - low).where(high > low, 1))
    return share.square_().mul_(len(deltas)).exp_().mul_((deltas * deltas.sum(dim=0)).tanh_())
