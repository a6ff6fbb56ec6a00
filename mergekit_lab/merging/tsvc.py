"""TSV-C: every task vector kept apart, compressed to its leading singular vectors.

Gargiulo et al. 2025, "Task singular vectors", section 3; reference: AntoAndGar/task_singular_vectors
(`TSVC_utils.py`). Of each matrix an expert keeps the top `int(r/T)` triplets, so that all experts together have
those of one matrix, about twice its room; what is no matrix stays whole. Each task has its own model: the base
plus its share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mergekit_lab.merging.contract import Site
from mergekit_lab.merging.factorizations import solve_triplets
from mergekit_lab.merging.spectral import AtomMethod, Atoms, note_rank, weigh


@dataclass(frozen=True, kw_only=True)
class TSVC(AtomMethod):
    """For task `t`: `θ0 + α U_t diag(σ_t) V_tᵀ` for matrices, `θ0 + α δ_t` for other tensors.

    `format="per_task"` stores all tasks' shares, and a run scores each task with its own. A dense merge is
    their sum.

    Args:
        rank: as every `AtomMethod`'s.
        coefficient: `α`; 1 in the paper.
        weights: `λ_t` scales `δ_t` before its decomposition; 1 by default.
    """

    by_task: ClassVar[bool] = True
    rest: ClassVar[str] = "the sum"

    def is_matrix(self, name: str, shape: Sequence[int]) -> bool:
        return len(shape) == 2

    def find_divisor(self, site: Site) -> Tensor:
        return site.weights.new_ones(())

    def merge_atoms(self, deltas: Tensor, sites: Sequence[Site]) -> tuple[Atoms, Tensor]:
        batch, experts = deltas.shape[:2]
        rank = note_rank(deltas.shape[2:], experts, self.rank, sites)
        triplets = solve_triplets(weigh(deltas, sites).flatten(0, 1), rank)
        u, s, v = (x.unflatten(0, (batch, experts)) for x in triplets)
        side_by_side = Atoms(u.transpose(1, 2).flatten(2), v.transpose(1, 2).flatten(2), s.flatten(1))
        atoms = side_by_side.to(deltas.dtype)
        return atoms, atoms.sigma
