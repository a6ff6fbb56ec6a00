"""TSV-M: task singular vectors, merged after whitening.

Gargiulo et al. 2025, "Task singular vectors", section 4; reference: AntoAndGar/task_singular_vectors.
Each expert keeps the top `int(r/T)` singular triplets of each matrix; the concatenated left and right
vectors are replaced by their polar factors, which removes the interference between experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mergekit_lab.merging.contract import Site
from mergekit_lab.merging.spectral import AtomMethod, Atoms, note_rank, weigh, whiten_atoms


@dataclass(frozen=True, kw_only=True)
class TSVM(AtomMethod):
    """`θ0 + α U_⊥ diag(σ) V_⊥ᵀ` for matrices, `θ0 + α·mean(δ)` for other tensors.

    Args:
        rank: as every `AtomMethod`'s.
        coefficient: `α`.
        weights: `λ_t` scales `δ_t` before its decomposition; 1 by default.
    """

    def merge_atoms(self, deltas: Tensor, sites: Sequence[Site]) -> tuple[Atoms, Tensor]:
        rank = note_rank(deltas.shape[2:], deltas.shape[1], self.rank, sites)
        atoms = whiten_atoms(weigh(deltas, sites), rank, sites).to(deltas.dtype)
        return atoms, atoms.sigma
