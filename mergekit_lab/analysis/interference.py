"""How task vectors overlap and conflict, tensor by tensor.

Everything is read once, a tensor at a time and in blocks, so memory is a few copies of the largest tensor
whatever the size of the model.

Legend: T experts, δ_t task vectors, v_t an expert's diagonal Fisher.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from mergekit_lab.analysis.bound import Bound, measure_bound
from mergekit_lab.checkpoints import Checkpoint
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.merging.inputs import Inputs
from mergekit_lab.ranges import Count, check_value

_BLOCK = 1 << 19
_EXACT = 256
_SPARE = 12
_KEPT = 16


@dataclass
class Sums:
    """Sums over entries, of which all other measures are ratios. All `[T, T]` float64.

    Attributes:
        dots: `δ_i · δ_j`.
        both: entries in which both are not zero.
        against: entries in which their signs differ.
        shared: `Σ min(|δ_i|, |δ_j|)`, what they both hold.
        lost: the part of it in entries whose signs differ: what cancels when they are added.
        harm: `½ Σ v_i δ_j²`, the rise of expert i's loss when δ_j is added, to second order; zero without
            Fishers.
    """

    dots: Tensor
    both: Tensor
    against: Tensor
    shared: Tensor
    lost: Tensor
    harm: Tensor

    @classmethod
    def make_zero(cls, experts: int) -> Self:
        """Sums over no entries."""
        return cls(*(torch.zeros(experts, experts, dtype=torch.float64) for _ in range(6)))

    def add(self, other: Self) -> None:
        """Add what was summed over other entries."""
        for name in vars(self):
            getattr(self, name).add_(getattr(other, name))

    def add_block(self, deltas: Tensor, fishers: Tensor | None) -> None:
        """Add `[T, n]` task vectors and Fishers."""
        signs = deltas.sign()
        present = signs.abs()
        both = (present @ present.T).double().cpu()
        self.dots += (deltas @ deltas.T).double().cpu()
        self.both += both
        self.against += (both - (signs @ signs.T).double().cpu()) / 2
        sizes = deltas.abs()
        for i in range(len(deltas)):
            for j in range(i + 1):
                smaller = torch.minimum(sizes[i], sizes[j])
                shared = float(smaller.sum(dtype=torch.float64))
                agreeing = float((smaller * (signs[i] * signs[j])).sum(dtype=torch.float64))
                for a, b in {(i, j), (j, i)}:
                    self.shared[a, b] += shared
                    self.lost[a, b] += (shared - agreeing) / 2
        if fishers is not None:
            self.harm += 0.5 * (fishers @ deltas.square().T).double().cpu()

    @property
    def norms(self) -> Tensor:
        """`‖δ_t‖`, `[T]`."""
        return self.dots.diagonal().clamp_min(0).sqrt()

    @property
    def cosine(self) -> Tensor:
        return _divide(self.dots, self.norms[:, None] * self.norms)

    @property
    def sign_conflict(self) -> Tensor:
        """Of the entries that both move, the share they move in opposite directions; ½ for unrelated ones."""
        return _divide(self.against, self.both)

    @property
    def canceling(self) -> Tensor:
        """Of the length that both hold, the share that cancels in the sum; ½ for unrelated ones."""
        return _divide(self.lost, self.shared)


@dataclass
class Spectra:
    """The spectra of the task vectors of one matrix.

    Attributes:
        rank: k, of the leading singular vectors that are compared.
        values: the leading singular values, `[T, min(k, 16)]`, the largest first.
        stable_rank: `‖δ_t‖²/σ₁²`, `[T]`.
        energy: the share of `‖δ_t‖²` in the first k singular values, `[T]`.
        overlap: of the k-dimensional leading subspaces, the mean squared cosine of left and of right ones,
            `[T, T]`: 1 for the same subspace.
        chance: what random subspaces have.
    """

    rank: int
    values: Tensor
    stable_rank: Tensor
    energy: Tensor
    overlap: Tensor
    chance: float


@dataclass
class Layer:
    """One tensor of the model."""

    name: str
    shape: tuple[int, ...]
    base_norm: float
    sums: Sums
    spectra: Spectra | None
    bound: Bound | None = None
    """Of a matrix, with Fishers."""

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        content: dict[str, Any] = {"name": self.name, "shape": list(self.shape), "base_norm": self.base_norm}
        content |= encode_sums(self.sums)
        if self.spectra is not None:
            content |= {
                name: value.tolist() if isinstance(value, Tensor) else value
                for name, value in vars(self.spectra).items()
            }
        if self.bound is not None:
            content |= self.bound.to_json()
        return content


@dataclass
class Interference:
    """The measures of all experts, over all tensors.

    Attributes:
        experts: names, in the order of every `[T, …]`.
        layers: every tensor that is merged.
        total: over all of them.
        base_norm: `‖θ0‖` over the same.
        has_fishers: whether `harm` was computed.
        fisher_traces: `Σ v_t`, `[T]`.
        bound: over all matrices.
    """

    experts: tuple[str, ...]
    has_fishers: bool
    layers: list[Layer] = field(default_factory=list)
    total: Sums = field(init=False)
    base_norm: float = 0.0
    fisher_traces: Tensor = field(init=False)
    bound: Bound = field(default_factory=Bound)

    def __post_init__(self) -> None:
        self.total = Sums.make_zero(len(self.experts))
        self.fisher_traces = torch.zeros(len(self.experts), dtype=torch.float64)

    def add(self, layer: Layer, traces: Tensor) -> None:
        """Take in one more layer and the traces of its Fishers."""
        self.layers.append(layer)
        self.total.add(layer.sums)
        self.base_norm = (self.base_norm**2 + layer.base_norm**2) ** 0.5
        self.fisher_traces += traces
        if layer.bound is not None:
            self.bound.add(layer.bound)


def measure_layers(
    inputs: Inputs,
    *,
    fishers: Mapping[str, Checkpoint] | None = None,
    rank: int = 16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Iterator[tuple[Layer, Tensor]]:
    """Measure one merged tensor after another; the model's own order.

    Args:
        inputs: as `merging.inputs.open_inputs` checked them.
        fishers: by expert; with the tensors' own names.
        rank: leading singular vectors of a matrix that are compared, at most a T-th of its smaller side.
        device: where the arithmetic happens.
        seed: of the sketches that large matrices' leading vectors are found from.

    Yields:
        The layer and `Σ v_t` of it, `[T]` (zero without Fishers).

    Raises:
        InputError: a rank under 1, a Fisher that lacks a tensor or has negative entries, entries that are not
            finite.
    """
    check_value(rank, Count, "rank")
    for name in inputs.merged:
        base, tensors = inputs.base[name], [expert[name] for expert in inputs.experts.values()]
        sums, squares = Sums.make_zero(len(tensors)), 0.0
        traces = torch.zeros(len(tensors), dtype=torch.float64)
        weights: list[Tensor] = []
        if fishers is not None:
            weights = [_read_fisher(fishers[expert], name, base.shape) for expert in inputs.experts]
        for start in range(0, base.numel(), _BLOCK):
            part = slice(start, start + _BLOCK)
            origin, *rows = (x.reshape(-1)[part].to(device).float() for x in (base, *tensors, *weights))
            deltas = torch.stack(rows[: len(tensors)]) - origin
            if not bool(torch.isfinite(deltas).all()):
                inputs.refuse_non_finite([name])
            block = torch.stack(rows[len(tensors) :]) if weights else None
            if block is not None:
                if not bool((block.isfinite() & (block >= 0)).all()):
                    _refuse_fisher(weights, inputs, fishers or {}, name)
                traces += block.sum(dim=1, dtype=torch.float64).cpu()
            sums.add_block(deltas, block)
            squares += float(origin.square().sum(dtype=torch.float64))
        spectra = bound = None
        if base.dim() == 2 and min(base.shape) > 1:
            origin = base.to(device).float()
            spectra = _measure_spectra(origin, tensors, sums.norms, rank, seed)
            if weights:
                deltas = torch.stack([tensor.to(device).float() for tensor in tensors]) - origin
                bound = measure_bound(deltas, torch.stack([w.to(device).float() for w in weights]), rank)
        yield Layer(name, tuple(base.shape), squares**0.5, sums, spectra, bound), traces


def _read_fisher(checkpoint: Checkpoint, name: str, shape: torch.Size) -> Tensor:
    if name not in checkpoint or checkpoint[name].shape != shape:
        raise InputError(f"{checkpoint.label} has no tensor {name!r} of shape {list(shape)}")
    return checkpoint[name]


def _refuse_fisher(weights: list[Tensor], inputs: Inputs, fishers: Mapping[str, Checkpoint], name: str) -> None:
    """Raise for the first Fisher of a tensor with entries that no Fisher has, naming file and tensor."""
    for expert, values in zip(inputs.experts, weights, strict=True):
        wrong = {"NaN or infinite": ~values.isfinite(), "negative": values < 0}
        for kind, entries in wrong.items():
            if bool(entries.any()):
                source = fishers[expert]
                where = f" ({join_names(map(str, source.files))})" if source.files else ""
                raise InputError(
                    f"tensor {name!r} of {source.label}{where} holds {int(entries.sum())} {kind} entries"
                )


def _measure_spectra(base: Tensor, tensors: list[Tensor], norms: Tensor, rank: int, seed: int) -> Spectra:
    k = max(1, min(rank, min(base.shape) // len(tensors)))
    triplets = [_find_leading(tensor.to(base.device).float() - base, k, seed) for tensor in tensors]
    left, sigma, right = map(torch.stack, zip(*triplets, strict=True))
    sigma, squares = sigma.double().cpu(), norms.square()
    alike = [torch.einsum("imk,jml->ijkl", x, x).square().sum(dim=(2, 3)) / k for x in (left, right)]
    return Spectra(
        rank=k,
        values=sigma[:, :_KEPT],
        stable_rank=_divide(squares, sigma[:, 0].square()),
        energy=_divide(sigma.square().sum(dim=1), squares).clamp_max(1),
        overlap=torch.stack(alike).mean(dim=0).double().cpu(),
        chance=(k / base.shape[0] + k / base.shape[1]) / 2,
    )


def _find_leading(matrix: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k leading singular triplets: exact for small matrices, by subspace iteration for large ones."""
    if min(matrix.shape) <= _EXACT:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return u[:, :k], s[:k], vh[:k].T
    with torch.random.fork_rng(devices=[matrix.device] if matrix.is_cuda else []):
        torch.manual_seed(seed)
        u, s, v = torch.svd_lowrank(matrix, q=min(k + _SPARE, min(matrix.shape)), niter=4)
    return u[:, :k], s[:k], v[:, :k]


def _divide(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below.clamp_min(1e-300), torch.zeros_like(above))


def encode_sums(sums: Sums) -> dict[str, Any]:
    """The ratios and norms as JSON."""
    content = {
        "norms": sums.norms.tolist(),
        "cosine": sums.cosine.tolist(),
        "sign_conflict": sums.sign_conflict.tolist(),
        "canceling": sums.canceling.tolist(),
    }
    return content | ({"harm": sums.harm.tolist()} if bool(sums.harm.any()) else {})
