"""DARE: drop entries of every task vector at random, rescale the rest, merge with another method.

Yu et al. 2024, "Language models are Super Mario", section 3; reference: yule-BUAA/MergeLM. The masks come
from a counter-based hash of (seed, expert, tensor, flat index), so they do not depend on the order of
experts or tensors, on sharding or on the device; E[DARE] is the inner method. `rescale="l1"` is what
mergekit runs: every tensor gets its old L1 norm back, which is not the paper's 1/(1−p).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Method, Site, Stream, require, require_choice
from mergekit_lab.merging.pieces import counter_uniform, drop_and_rescale, hash_key
from mergekit_lab.merging.task_arithmetic import TaskArithmetic


@dataclass(frozen=True, kw_only=True)
class DARE(Method):
    """Drop and rescale, then `inner`.

    Args:
        drop: probability that an entry is dropped, in [0, 1); 0 is the inner method.
        seed: of the masks.
        rescale: `"inverse"` (the paper) or `"l1"` (mergekit).
        inner: the method that merges what is left; coefficient and weights are the inner method's.
    """

    drop: float = 0.9
    seed: int = 0
    rescale: str = "inverse"
    inner: Method = field(default_factory=TaskArithmetic)

    def __post_init__(self) -> None:
        require(0 <= self.drop < 1, "drop", self.drop, "in [0, 1)")
        require_choice("rescale", self.rescale, ("inverse", "l1"))
        require(self.weights is None, "weights", self.weights, "None: give them to the inner method")

    @property
    def side_inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.side_inputs

    @property
    def elementwise(self) -> bool:
        return self.inner.elementwise and self.rescale == "inverse"

    @property
    def scale(self) -> float:
        return self.inner.scale

    def at(self, coefficient: float) -> Self:
        return replace(self, inner=self.inner.at(coefficient))

    def expert_weights(self, experts: Any) -> list[float]:
        return self.inner.expert_weights(experts)

    def side_name(self, kind: str, name: str) -> str | None:
        return self.inner.side_name(kind, name)

    def survey(self, stream: Stream) -> Any:
        require(
            self.rescale == "inverse" or type(self.inner).survey is Method.survey,
            "rescale",
            self.rescale,
            "'inverse' when the inner method surveys the whole model",
        )
        return self.inner.survey(stream.map(self._thin))

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        return self.inner.merge(name, base, self._thin(name, deltas, site), site)

    def _thin(self, name: str, deltas: Tensor, site: Site) -> Tensor:
        if self.drop == 0:
            return deltas
        rows = []
        for expert, delta in zip(site.experts, deltas, strict=True):
            key = hash_key(self.seed, expert, name)
            chance = counter_uniform(key, site.offset, delta.numel(), delta.device)
            rows.append(drop_and_rescale(delta, chance.view_as(delta) >= self.drop, self.drop, self.rescale))
        return torch.stack(rows)
