"""DARE: drop entries of every task vector at random, rescale the rest, merge with another method.

Yu et al. 2024, "Language models are Super Mario", section 3; reference: yule-BUAA/MergeLM. The paper names the
share that is dropped, p; `density` is 1 − p, the share that stays, as in the other methods. The masks come
from a counter-based hash of (seed, expert, tensor, flat index), so they do not depend on the order of
experts or tensors, on sharding or on the device; E[DARE] is the inner method. `rescale="l1"` is what
mergekit runs: every tensor gets its old L1 norm back, which is not the paper's 1/(1−p).
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Blocks, Site
from mergekit_lab.merging.dropping import apply_mask, apply_packed, draw_mask, make_counters, pack_mask
from mergekit_lab.merging.sparsified import SparsifiedMethod
from mergekit_lab.ranges import Share


@dataclass(frozen=True, kw_only=True)
class DARE(SparsifiedMethod):
    """Drop and rescale, then `inner`.

    Args:
        density: probability of keeping an entry, in (0, 1]; 1 is the inner method.
        seed: draws the masks.
        rescale: `"inverse"` (the paper) or `"l1"` (mergekit), which needs an inner method that works tensor by
            tensor.
        inner: the method that merges what is left; coefficient and weights are the inner method's.
    """

    density: Share = 0.1
    seed: int = 0
    rescale: Literal["inverse", "l1"] = "inverse"

    by_blocks = True
    propagates = property(attrgetter("inner.propagates"))

    @property
    def by_entries(self) -> bool:  # type: ignore[override]
        return self.rescale == "inverse"

    def survey_sparsity(self, name: str, entries: int, blocks: Blocks) -> tuple[Tensor | None, Tensor | None]:
        """`‖δ_t‖₁ / ‖kept δ_t‖₁`, `[T]`, 0 where nothing is kept; on a CPU what was kept, in bits."""
        if self.by_entries or self.density == 1:
            return None, None
        before = after = torch.zeros(())
        bits: Tensor | None = None
        for _, deltas, site in blocks():
            sizes, keep = deltas.abs(), self._draw(deltas, site)
            before = before + sizes.sum(dim=1).double().cpu()
            after = after + apply_mask(sizes, keep, out=sizes).sum(dim=1).double().cpu()
            whole_bytes = deltas.shape[1] % 8 == 0 or deltas.shape[1] == entries
            if site.offset == 0 and whole_bytes and deltas.device.type == "cpu":
                bits = torch.empty(len(deltas), -(-entries // 8), dtype=torch.uint8)
            if bits is not None:
                pack_mask(keep, bits, site.offset)
        return torch.where(after > 0, before / after, 0.0), bits

    def sparsify(self, name: str, deltas: Tensor, site: Site) -> Tensor:
        if self.density == 1:
            return deltas
        factors, bits = site.tensor or (None, None)
        if factors is not None and bits is not None:
            return apply_packed(deltas, bits, site.offset, factors)
        sparse = apply_mask(deltas, self._draw(deltas, site), out=torch.empty_like(deltas))
        return sparse.div_(self.density) if factors is None else sparse.mul_(factors.to(deltas)[:, None])

    def _draw(self, deltas: Tensor, site: Site) -> Tensor:
        """Whether an entry stays, shaped like `deltas`."""
        keep = torch.empty_like(deltas, dtype=torch.bool, memory_format=torch.contiguous_format)
        drawn = [make_counters(self.seed, expert, site.segments) for expert in site.experts]
        draw_mask(drawn, keep, 1 - self.density)
        return keep
