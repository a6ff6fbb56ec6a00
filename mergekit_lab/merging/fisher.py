"""Fisher-weighted average: `θ0 + Σ W_t δ_t / Σ W_t` with `W_t` from the diagonal Fisher.

Matena & Raffel 2022, "Merging models with Fisher-weighted averaging"; reference for `matena`:
mmatena/model_merging. There only the first model's Fisher is floored, which makes the result depend on
the order of experts; here all are, unless `favor_target`. `mergelm` is what yule-BUAA/MergeLM and
tanganke/fusion_bench run: the floor is added, and the norm has it too.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mergekit_lab.errors import InputError, join_names
from mergekit_lab.merging.contract import Method, Site, Stream
from mergekit_lab.ranges import Magnitude, require


def sum_fishers(stream: Stream, normalize: str) -> Tensor:
    """The sum of every expert's Fisher over the whole model (`"norm"`: of its squares), `[T]`, in float64."""
    totals = torch.zeros(len(stream.experts), dtype=torch.float64)
    for fisher in stream.read_side_blocks("fisher"):
        values = fisher.double()
        totals += (values.square() if normalize == "norm" else values).sum(dim=1).cpu()
    return totals


@dataclass(frozen=True, kw_only=True)
class Fisher(Method):
    """Fisher-weighted average.

    Args:
        preset: `"matena"`: `W_t = λ_t max(F_t, floor)`; `"mergelm"`: `W_t = λ_t (F_t + floor)`.
        floor: ≥ 0.
        normalize: bring the experts' Fishers to one scale: `"norm"` divides `W_t` by the L2 norm of `F_t` over
            all floating-point entries of the model, `"trace"` by their sum (`mergelm`: plus the floor),
            `"none"` by nothing.
        favor_target: `matena` only: floor only the first expert's Fisher, as the original does.
        weights: `λ_t`, 1 by default.

    Needs `statistics={"fisher": …}`. If all `W_t` of an entry are 0, the plain mean is taken.

    Raises:
        InputError: settings that exclude each other; at the merge, a Fisher without a norm to divide by.
    """

    preset: Literal["matena", "mergelm"] = "matena"
    floor: Magnitude = 1e-6
    normalize: Literal["none", "trace", "norm"] = "none"
    favor_target: bool = False

    side_inputs: ClassVar[tuple[str, ...]] = ("fisher",)

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = not self.favor_target or self.preset == "matena"
        require(fits, "favor_target", self.favor_target, "False for the preset 'mergelm'")

    elementwise = True
    propagates = True
    pools = True

    def survey(self, stream: Stream) -> Any:
        if self.normalize == "none":
            return None
        totals = sum_fishers(stream, self.normalize)
        norms = totals.sqrt() if self.normalize == "norm" else totals
        norms = norms + (self.floor if self.preset == "mergelm" else 0.0)
        zero = [expert for expert, norm in zip(stream.experts, norms.tolist(), strict=True) if norm == 0]
        if zero:
            raise InputError(f"the fisher of {join_names(zero)} is 0 everywhere and has no norm to divide by")
        return norms.reciprocal()

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        fisher = site.side["fisher"]
        if self.preset == "mergelm":
            importance = fisher + self.floor
        elif self.favor_target:
            importance = torch.cat([fisher[:1].clamp(min=self.floor), fisher[1:]])
        else:
            importance = fisher.clamp(min=self.floor)
        share = site.weights.clone()
        if site.survey is not None:
            share *= site.survey.to(share)
        if site.survey is not None or not site.unit:
            importance = importance * share.view(-1, *[1] * base.dim())
        total = importance.sum(dim=0)
        merged = (importance * deltas).sum(dim=0) / total
        if self.floor > 0 and site.unit:
            return merged  # no total is 0, and asking would wait for the device
        return torch.where(total == 0, deltas.mean(dim=0), merged) if not bool(total.all()) else merged
