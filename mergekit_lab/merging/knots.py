"""KnOTS: merge the experts' right factors in the common left basis of their updates.

Stoica et al. 2025, "Model merging with SVD to tie the knots", section 4. The SVD of all updates of a layer side
by side, `[δ_1 … δ_T] = U Σ [V_1ᵀ … V_Tᵀ]`, gives every expert a factor in the same basis `U`; these are merged,
by TIES or another method, and multiplied back.

Reference: gstoica27/KnOTS (`SVDMerger`), which merges `ΣV_tᵀ`, trims them over all layers at once and leaves
out directions with `σ ≤ 1e-5`: preset `"authors"`. The paper's formula merges `V_tᵀ`, as
apanariello4/core-space-merging does: preset `"paper"`. They differ if the inner method compares magnitudes of
different rows, as TIES' trimming does.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch

from mergekit_lab.checkpoints.adapter_writing import LowRankChange
from mergekit_lab.merging.contract import Method
from mergekit_lab.merging.subspace import Changes, LeftDirections, MatrixBasis, SubspaceMethod
from mergekit_lab.merging.ties import TIES
from mergekit_lab.ranges import Magnitude


@dataclass(frozen=True, kw_only=True)
class KnOTS(SubspaceMethod):
    """`θ0 + U Σ inner(V_1ᵀ, …, V_Tᵀ)` for matrices, `inner` of the task vectors for other tensors.

    Args:
        preset: `"paper"` merges `V_tᵀ`, `"authors"` `ΣV_tᵀ`.
        tolerance: drop directions with singular values up to this, ≥ 0; the authors' 1e-5.
        inner: the method that merges the factors; coefficient and weights are its own. With a linear one, such
            as task arithmetic, KnOTS changes nothing.
        weights: None; they are given to the inner method.

    Raises:
        InputError: an inner method that reads side inputs.
    """

    preset: Literal["paper", "authors"] = "paper"
    tolerance: Magnitude = 1e-5
    inner: Method = field(default_factory=TIES)

    def find_basis(self, changes: Changes) -> MatrixBasis:
        columns = LeftDirections()
        for change in changes():
            if isinstance(change, LowRankChange):  # its inputs become as many as its rank
                columns.add(change.b @ torch.linalg.qr(change.a.mT, mode="r").R.mT)
            else:
                columns.add(change)
            del change  # it is as large as the matrix
        left, sizes = columns.find()
        kept = sizes > self.tolerance
        return MatrixBasis(left[:, kept], scales=sizes[kept] if self.preset == "paper" else None)
