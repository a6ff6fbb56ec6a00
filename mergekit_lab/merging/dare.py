"""DARE: drop entries of every task vector at random, rescale the rest, merge with another method.

Yu et al. 2024, "Language models are Super Mario", section 3; reference: yule-BUAA/MergeLM. The masks come
from a counter-based hash of (seed, expert, tensor, flat index), so they do not depend on the order of
experts or tensors, on sharding or on the device; E[DARE] is the inner method. `rescale="l1"` is what
mergekit runs: every tensor gets its old L1 norm back, which is not the paper's 1/(1−p).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Blocks, Method, Site, Stream, require, require_choice
from mergekit_lab.merging.dropping import counter_keep, counters, drop_and_rescale, masked, pack, thinned
from mergekit_lab.merging.task_arithmetic import TaskArithmetic


@dataclass(frozen=True, kw_only=True)
class DARE(Method):
    """Drop and rescale, then `inner`.

    Args:
        drop: probability that an entry is dropped, in [0, 1); 0 is the inner method.
        seed: of the masks.
        rescale: `"inverse"` (the paper) or `"l1"` (mergekit), which takes an inner method that works tensor by
            tensor.
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
        return self.inner.elementwise

    @property
    def propagates(self) -> bool:
        return self.inner.propagates

    @property
    def pools(self) -> bool:
        return self.inner.pools and self.rescale == "inverse"

    @property
    def scale(self) -> float:
        return self.inner.scale

    def at(self, coefficient: float) -> Self:
        return replace(self, inner=self.inner.at(coefficient))

    @property
    def weights_by_tensor(self) -> bool:
        return self.inner.weights_by_tensor

    def expert_weights(self, experts: Sequence[str], name: str = "") -> list[float]:
        return self.inner.expert_weights(experts, name)

    def side_name(self, kind: str, name: str) -> str | None:
        return self.inner.side_name(kind, name)

    def check_tensors(self, names: Sequence[str]) -> None:
        self.inner.check_tensors(names)

    def survey(self, stream: Stream) -> Any:
        return self.inner.survey(stream.map(self._thin if self.rescale == "inverse" else self._refuse))

    def survey_tensor(self, name: str, entries: int, blocks: Blocks) -> Any:
        restored = None if self.rescale == "inverse" else self._restored(entries, blocks)

        def thinned() -> Iterator[tuple[Tensor, Site]]:
            for deltas, site in blocks():
                yield self._thin(name, deltas, replace(site, tensor=(restored, None))), site

        return restored, self.inner.survey_tensor(name, entries, thinned)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        inner_site = replace(site, tensor=site.tensor[1] if site.tensor else None)
        return self.inner.merge(name, base, self._thin(name, deltas, site), inner_site)

    def _refuse(self, name: str, deltas: Tensor, site: Site) -> Tensor:
        raise InputError(
            f"rescale is {self.rescale!r}, which takes whole tensors; it must be 'inverse' where "
            f"{type(self.inner).__name__} surveys the task vectors of the whole model"
        )

    def _restored(self, entries: int, blocks: Blocks) -> _Restored:
        before = after = torch.zeros(())
        bits: Tensor | None = None
        for deltas, site in blocks():
            sizes, keep = deltas.abs(), self._keep(deltas, site)
            before = before + sizes.sum(dim=1).double().cpu()
            after = after + masked(sizes, keep, out=sizes).sum(dim=1).double().cpu()
            whole_bytes = deltas.shape[1] % 8 == 0 or deltas.shape[1] == entries
            if site.offset == 0 and whole_bytes and deltas.device.type == "cpu":
                bits = torch.empty(len(deltas), -(-entries // 8), dtype=torch.uint8)
            if bits is not None:
                pack(keep, bits, site.offset)
        return _Restored(torch.where(after > 0, before / after, 0.0), bits)

    def _thin(self, name: str, deltas: Tensor, site: Site) -> Tensor:
        if self.drop == 0:
            return deltas
        restored = site.tensor[0] if site.tensor else None
        if restored is not None:
            if restored.bits is not None:
                return thinned(deltas, restored.bits, site.offset, restored.factors)
            factors = restored.factors.to(deltas).view(-1, *[1] * (deltas.dim() - 1))
            return self._kept(deltas, site).mul_(factors)
        if self.rescale == "inverse":
            return self._kept(deltas, site).div_(1 - self.drop)
        keep = self._keep(deltas, site)
        return torch.stack([drop_and_rescale(d, k, self.drop, "l1") for d, k in zip(deltas, keep, strict=True)])

    def _kept(self, deltas: Tensor, site: Site) -> Tensor:
        return masked(deltas, self._keep(deltas, site), out=torch.empty_like(deltas))

    def _keep(self, deltas: Tensor, site: Site) -> Tensor:
        """Whether an entry stays, shaped like `deltas`."""
        keep = torch.empty_like(deltas, dtype=torch.bool, memory_format=torch.contiguous_format)
        counter_keep([counters(self.seed, expert, site.segments) for expert in site.experts], keep, self.drop)
        return keep


@dataclass(frozen=True)
class _Restored:
    """One tensor's `‖δ_t‖₁ / ‖kept δ_t‖₁`, `[T]`, 0 where nothing is kept; on a CPU what was kept, in bits."""

    factors: Tensor
    bits: Tensor | None
