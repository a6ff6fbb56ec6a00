"""The base of the matrix methods, and the experts' singular directions whitened together.

Legend: `B` same-shaped matrices `m×n`, `T` experts, `r = min(m, n)`, `k` triplets an expert keeps, `p = kT`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Method, ScaledMethod, Site
from mergekit_lab.merging.factorizations import orthogonalize, solve_triplets
from mergekit_lab.merging.stacks import find_stacks
from mergekit_lab.ranges import Count

_NO_MATRIX = "text_projection"


@dataclass(frozen=True, kw_only=True)
class SpectralMethod(ScaledMethod):
    """Base of the methods that merge matrices as matrices: `θ0 + α·merge_matrices(δ)`.

    2-D tensors are treated so, embeddings included, text projections excepted (the rule of the authors of TSV-M
    and Iso; tanganke/fusion_bench has no exceptions); all others get `α` times the mean of the task vectors,
    each scaled by its `λ_t`.
    """

    by_matrix = True
    rest: ClassVar[str] = "the mean"
    """What other tensors become, for messages."""

    def is_matrix(self, name: str, shape: Sequence[int]) -> bool:
        """Whether `merge_matrices` takes this tensor."""
        return len(shape) == 2 and _NO_MATRIX not in name

    def merge_matrices(self, deltas: Tensor, sites: Sequence[Site]) -> Tensor:
        """Merge same-shaped matrices at `α = 1`.

        Args:
            deltas: `δ`, `[B, T, m, n]`.
            sites: one per matrix. They differ in side inputs and notes, not in the layout.

        Returns:
            `[B, m, n]`.
        """
        raise NotImplementedError

    def merge_other(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        """Merge a tensor that is no matrix."""
        return site.weigh(deltas).mean(dim=0)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        if self.is_matrix(name, base.shape):
            return self.merge_matrices(deltas[None], [site])[0]
        return self.merge_other(name, base, deltas, site)


_LAYER_WEIGHTS = re.compile(
    r"attn\.(in_proj_weight|out_proj\.weight)$"
    r"|mlp\.c_(fc|proj)\.weight$"
    r"|(attn|attention)\.(c_attn|q_attn|c_proj)\.weight$"
    r"|(^|\.)([qkvo]|qkv|out)_proj\.weight$"
    r"|(^|\.)(fc[12]|w[123]|(gate|up|gate_up|down)_proj)\.weight$"
    r"|(^|\.)(self\.(query|key|value)|(intermediate|output)\.dense)\.weight$"
)


@dataclass(frozen=True, kw_only=True)
class LayerWeightsMethod(SpectralMethod):
    """Base of the methods that merge attention and MLP weights, which they know by name.

    These are 2-D tensors with OpenCLIP's names (`attn.in_proj_weight`, `attn.out_proj.weight`,
    `mlp.c_fc.weight`, `mlp.c_proj.weight`) or transformers' (`q/k/v/o/qkv/out_proj`, `fc1`, `fc2`, `w1` to
    `w3`, `gate/up/gate_up/down_proj`, `c_attn`, BERT's `self.query/key/value`, `intermediate.dense` and
    `output.dense`). Others keep the base.

    Args:
        all_matrices: merge every matrix so, and take the mean of other tensors.

    Raises:
        InputError: at the merge, no tensor has such a name.
    """

    all_matrices: bool = False

    @property
    def rest(self) -> str:  # type: ignore[override]
        return "the mean" if self.all_matrices else "the base"

    def is_matrix(self, name: str, shape: Sequence[int]) -> bool:
        return len(shape) == 2 and (self.all_matrices or _LAYER_WEIGHTS.search(name) is not None)

    def check_tensors(self, names: Sequence[str]) -> None:
        super().check_tensors(names)
        if not self.all_matrices and not any(
            _LAYER_WEIGHTS.search(n) or _LAYER_WEIGHTS.search(n + ".weight") for n in names
        ):
            raise InputError(
                f"{type(self).__name__} knows attention and MLP weights by their names (attn.in_proj_weight, "
                "q_proj.weight, fc1.weight, …) and this model has none: set all_matrices=True to merge every "
                "matrix"
            )

    def merge_other(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        return super().merge_other(name, base, deltas, site) if self.all_matrices else torch.zeros_like(base)


def explain_shapes(
    method: Method, model: Mapping[str, Sequence[int]], merged: Collection[str] | None = None
) -> list[str]:
    """What the method makes of a model's stacks of matrices and other tensors that are merged; None: of all."""
    shapes = {name: shape for name, shape in model.items() if merged is None or name in merged}
    stacks = {name: stack for name, stack in find_stacks(model).items() if name in shapes}
    if not isinstance(method, SpectralMethod):
        how = "matrix by matrix" if method.by_matrix and not method.elementwise else "each as one tensor"
        return [f"{len(stacks)} stacks of a mixture's experts: {how}"] if stacks else []
    taken = [n for n, s in stacks.items() if method.is_matrix(stacks[n].members[0], s.shape)]
    matrices = [n for n, shape in shapes.items() if n not in stacks and method.is_matrix(n, shape)]
    lines = [f"{len(matrices)} matrices"]
    if taken:
        lines[0] += (
            f", and of {len(taken)} stacks {sum(len(stacks[n].members) for n in taken)} of a mixture's experts"
        )
    rest = len(shapes) - len(matrices) - len(taken)
    return [*lines, f"{rest} other tensors: {method.rest}"] if rest else lines


def weigh(deltas: Tensor, sites: Sequence[Site]) -> Tensor:
    """`λ_t δ_t` of same-shaped matrices `[B, T, m, n]`; the input itself where every weight is 1."""
    if all(site.unit for site in sites):
        return deltas
    return deltas * torch.stack([site.weights for site in sites])[..., None, None]


@dataclass(frozen=True)
class Atoms:
    """Rank-one directions of all experts, whitened together.

    `p` atoms a matrix, in the order of the experts, `k` of each: `u_i v_iᵀ` with `u` `[B, m, p]` and `v`
    `[B, n, p]` whose columns are orthonormal (a partial isometry where the experts' directions are not
    independent); `sigma` `[B, p]` their singular values.
    """

    u: Tensor
    v: Tensor
    sigma: Tensor

    def lift(self, coordinates: Tensor) -> Tensor:
        """`U_⊥ diag(d) V_⊥ᵀ` for coordinates `d` `[B, p]`: `[B, m, n]`, in float64."""
        return (self.u.double() * coordinates.double()[:, None]) @ self.v.double().mT

    def to(self, dtype: torch.dtype) -> Self:
        """Contiguous, like tensors read from a file, because products round differently in other layouts."""
        return type(self)(*(x.to(dtype).contiguous() for x in (self.u, self.v, self.sigma)))


@dataclass(frozen=True, kw_only=True)
class AtomMethod(SpectralMethod):
    """Base of the methods whose merged matrices are sums of atoms, which can be stored as such.

    Args:
        rank: cap on the triplets an expert keeps of a matrix, at least 1; None keeps `int(r/T)`, which no cap
            exceeds. Capped tensors, and those with `r < T` (nothing kept), are noted.
    """

    rank: Count | None = None

    def merge_atoms(self, deltas: Tensor, sites: Sequence[Site]) -> tuple[Atoms, Tensor]:
        """The atoms of same-shaped matrices and their merged coordinates at `α = 1`, `[B, p]`.

        For the arguments see `merge_matrices`. Both are rounded to the precision of `deltas`.
        """
        raise NotImplementedError

    def find_divisor(self, site: Site) -> Tensor:
        """The divisor of the sum of `λ_t δ_t` for tensors that are no matrices; 0-d."""
        return site.weights.new_tensor(len(site.experts))

    def merge_other(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        return site.weigh(deltas).sum(dim=0) / self.find_divisor(site)

    def merge_matrices(self, deltas: Tensor, sites: Sequence[Site]) -> Tensor:
        atoms, coordinates = self.merge_atoms(deltas, sites)
        return atoms.lift(coordinates).to(deltas.dtype)


def cap_rank(shape: Sequence[int], experts: int, cap: int | None) -> int:
    """Singular triplets an expert may keep of an `m×n` matrix: `int(r·(1/T))`, at most `cap`."""
    share = int(min(shape) * (1 / experts))
    return share if cap is None else min(cap, share)


def note_rank(shape: Sequence[int], experts: int, cap: int | None, sites: Sequence[Site]) -> int:
    """`cap_rank`, with a note where it is 0, or less than the cap asked for."""
    rank = cap_rank(shape, experts, cap)
    for site in sites:
        if rank == 0:
            site.note("rank", "0: more experts than the matrix has directions, the base stays")
        elif cap is not None and rank < cap:
            site.note("rank", f"{rank}: all that {experts} experts can have of {min(shape)} directions")
    return rank


def whiten_atoms(deltas: Tensor, rank: int, sites: Sequence[Site]) -> Atoms:
    """The top triplets of every `δ_t` in task order, `U` and `V` replaced by their polar factors; float64.

    Args:
        deltas: `[B, T, m, n]`.
        rank: `k`, with `kT ≤ r`.
        sites: receive the note `rank_deficient` where the experts' directions are not independent.

    Atoms with `σ = 0` (an expert equal to the base) are zero columns.
    """
    batch, experts, m, n = deltas.shape
    if rank == 0:
        u, v, sigma = (deltas.new_zeros(batch, *shape, dtype=torch.float64) for shape in ((m, 0), (n, 0), (0,)))
        return Atoms(u, v, sigma)
    u, s, v = (x.unflatten(0, (batch, experts)) for x in solve_triplets(deltas.flatten(0, 1), rank))
    real = s > 0
    sigma = s.flatten(1)
    u, v = (x.mul_(real[..., None, :]).mT.flatten(1, 2).mT for x in (u, v))
    white_u, u_rank = orthogonalize(u, deltas.dtype, overwrite=True)
    del u
    white_v, v_rank = orthogonalize(v, deltas.dtype, overwrite=True)
    for site, *ranks in zip(
        sites, real.flatten(1).sum(1).tolist(), u_rank.tolist(), v_rank.tolist(), strict=True
    ):
        if min(ranks) < sigma.shape[1]:
            site.note("rank_deficient", dict(zip(("atoms", "u", "v"), ranks, strict=True)))
    return Atoms(white_u, white_v, sigma)
