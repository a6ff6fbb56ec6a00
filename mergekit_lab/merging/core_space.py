"""Core Space: merge LoRA adapters as small matrices in the common bases of their factors.

Panariello et al. 2025, "Accurate and efficient low-rank model merging in core space", section 4. With the
adapters `B_t A_t` of a layer, `U_B` the left singular vectors of `[B_1 … B_T]` and `V_A` the right ones of the
`A_t` stacked, the cores `M_t = U_Bᵀ B_t A_t V_A` hold all of every adapter; they are merged by any method, and
`U_B M V_Aᵀ` is added to the base. Nothing larger than `kT × kT` is merged for adapters of rank `k`.

Reference: apanariello4/core-space-merging (`MatrixPerLayerMerger`), which merges layer by layer: its TIES is
the preset `core_space` of `TIES`, TSV is `TSVM`, its isotropic variant `IsoC`. It takes adapters only; here an
expert that is none is factored by its SVD first. Methods that turn with the bases (TSVM, IsoC) give the same
then, and those that look at single entries (TIES) do not: the bases depend on the factors.
"""

from dataclasses import dataclass, field

from torch import Tensor

from mergekit_lab.checkpoints.adapter_writing import LowRankChange
from mergekit_lab.merging.contract import Method
from mergekit_lab.merging.factorizations import solve_triplets
from mergekit_lab.merging.subspace import Changes, LeftDirections, MatrixBasis, SubspaceMethod
from mergekit_lab.merging.tsvm import TSVM
from mergekit_lab.ranges import Count

_ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class CoreSpace(SubspaceMethod):
    """`θ0 + U_B inner(M_1, …, M_T) V_Aᵀ` for matrices, `inner` of the task vectors for other tensors.

    Args:
        rank: directions per matrix that an expert keeps if it is not an adapter, at least 1; None keeps all
            above 1e-5 of the largest.
        inner: the method that merges the cores; coefficient and weights are its own. With a linear one, such
            as task arithmetic, Core Space changes nothing.
        weights: None; they are given to the inner method.

    Raises:
        InputError: an inner method that reads side inputs.
    """

    rank: Count | None = None
    inner: Method = field(default_factory=TSVM)

    def find_basis(self, changes: Changes) -> MatrixBasis:
        left, right = LeftDirections(), LeftDirections()
        for change in changes():
            factors = change if isinstance(change, LowRankChange) else self._factorize(change)
            left.add(factors.b)
            right.add(factors.a.mT)
            del change, factors  # they are as large as the matrix
        return MatrixBasis(left.find()[0], right.find()[0])

    def _factorize(self, change: Tensor) -> LowRankChange:
        rank = min(*change.shape, self.rank or max(change.shape))
        u, s, v = (x[0] for x in solve_triplets(change[None], rank))
        kept = s > _ROUNDING * s[:1]
        root = s[kept].sqrt()
        return LowRankChange(u[:, kept] * root, (v[:, kept] * root).mT)
