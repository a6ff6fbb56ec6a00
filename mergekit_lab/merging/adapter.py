"""Store a merge as one LoRA adapter: the change of the base, in low-rank factors.

If the experts are adapters and the merge is a weighted sum, its factors are theirs side by side, which is
exact. A merge in the experts' joint subspace has factors too. For all others every matrix's merged change is
cut to its largest singular directions, and the loss is measured. These methods merge the products `B·A`, never
the factors: a product has many factorizations, and a mean of factors is not a factor of the mean.

Legend: `ΔW` a weight's merged change `[out, in]`, `r` its rank.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.checkpoints import Checkpoint, find_adapter
from mergekit_lab.checkpoints.adaptable import find_adaptable
from mergekit_lab.checkpoints.adapter_layout import find_conv1d_weights
from mergekit_lab.checkpoints.adapter_writing import LowRankChange
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.merging.average import WeightAverage
from mergekit_lab.merging.contract import Method
from mergekit_lab.merging.factorizations import svd
from mergekit_lab.merging.inputs import open_inputs, select_tensors
from mergekit_lab.merging.stream import merge_coordinates, merge_tensors
from mergekit_lab.merging.subspace import SubspaceMethod, find_plain_adapters
from mergekit_lab.merging.task_arithmetic import TaskArithmetic
from mergekit_lab.ranges import Count, Share, check_settings

_ROUNDING = 1e-12


@dataclass
class AdapterMerge:
    """One merge as an adapter; `read_changes` makes it, and the rest is known then.

    Args:
        base, experts, method: of the merge.
        rank: of every weight at most; None: all that the experts have side by side, or what `energy` asks for.
        energy: share of a weight's `‖ΔW‖²` that is kept at least, in (0, 1], by as few directions as it takes.

    Attributes:
        ranks: of each weight.
        exact: whether nothing was cut.
        left_out: tensors with a change that no adapter of linear layers holds; they stay the base's.
        transposed: whether the base stores the weights as [in, out].
        joined: whether some weights are parts of a stack.

    Raises:
        InputError: a value out of range; neither is given and the merge is no sum of adapters.
    """

    base: Checkpoint
    experts: Mapping[str, Checkpoint]
    method: Method
    rank: Count | None = None
    energy: Share | None = None
    ranks: dict[str, int] = field(default_factory=dict, init=False)
    left_out: list[str] = field(default_factory=list, init=False)
    exact: bool = field(default=True, init=False)
    transposed: bool = field(default=False, init=False)
    joined: bool = field(default=False, init=False)
    _whole: float = field(default=0.0, init=False)
    _lost: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        check_settings(AdapterMerge, vars(self))
        if self.rank is None and self.energy is None and not self.is_sum and not self.is_joint:
            if not all(find_adapter(expert) for expert in self.experts.values()):
                why = "an expert is no adapter"
            elif not find_plain_adapters(self.experts):
                why = "an expert's adapter is more than LoRA of linear layers (DoRA, embeddings, whole tensors)"
            else:
                why = f"{type(self.method).__name__} is not a weighted sum"
            raise InputError(f"format=adapter needs rank=… or energy=… here: {why}, so changes have full rank")

    @property
    def is_sum(self) -> bool:
        """Whether the factors of the experts, side by side, are those of the merge."""
        plain = type(self.method) in (TaskArithmetic, WeightAverage)
        return plain and bool(find_plain_adapters(self.experts))

    @property
    def is_joint(self) -> bool:
        """Whether the merge is made of factors in a subspace of all experts', and so has factors itself."""
        return isinstance(self.method, SubspaceMethod) and bool(find_plain_adapters(self.experts))

    @property
    def error(self) -> float:
        """Relative error of the change over the whole model: ‖lost part‖ / ‖change‖."""
        return math.sqrt(self._lost / self._whole) if self._whole else 0.0

    def read_changes(
        self, *, include: Sequence[str] | None = None, exclude: Sequence[str] = (), **options: Any
    ) -> Iterator[tuple[str, LowRankChange]]:
        """The factors of each weight that changes, in float64, as they are made, by its name in an adapter; see
        `merge_tensors`."""
        oriented = find_conv1d_weights(self.base)
        names, pieces = find_adaptable(self.base)
        if self.is_sum or self.is_joint:
            join = self._join if self.is_sum else self._lift
            for name, factors in join(include, exclude, options):
                self.transposed |= name in oriented
                self.joined |= name in pieces
                yield names.get(name, name), self._keep(name, factors)
            return
        again = self.base.find_ties()
        options |= {"include": include, "exclude": exclude, "dtype": torch.float64}
        for name, value in merge_tensors(self.base, self.experts, self.method, **options):
            if name in again or not value.is_floating_point():
                continue
            change = value - self.base[name].to(value)
            if not bool(change.any()):
                continue
            if name not in names:
                self.left_out.append(name)
                self._whole += float(change.square().sum())
                self._lost += float(change.square().sum())
                continue
            self.transposed |= name in oriented
            self.joined |= name in pieces
            yield names[name], self._keep(name, change.mT if name in oriented else change)

    def describe(self) -> list[str]:
        """A description for model cards."""
        ranks = sorted(set(self.ranks.values()))
        how = "exact" if self.exact else "cut to the largest directions of each weight"
        how += " in what it holds" if self.exact and self.left_out else ""
        span = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        notes = [f"adapter of rank {span}, {how}; relative error of what is added: {self.error:.3g}"]
        if self.left_out:
            notes.append(
                f"{len(self.left_out)} tensors are not weights of linear layers that peft adapts, and stay the "
                f"base's: {join_names(self.left_out)}"
            )
        return notes

    def _join(
        self, include: Sequence[str] | None, exclude: Sequence[str], options: Mapping[str, Any]
    ) -> Iterator[tuple[str, LowRankChange]]:
        """The experts' factors side by side, each weighed by its coefficient."""
        for name in select_tensors(self.base.specs, self.base.find_ties(), include, exclude):
            weights = self.method.weigh_experts(tuple(self.experts), name)
            total = math.fsum(weights) if isinstance(self.method, WeightAverage) else 1.0
            parts = []
            for weight, expert in zip(weights, self.experts.values(), strict=True):
                folded = find_adapter(expert)
                factors = folded.read_factors(name) if folded else None
                if factors is not None:
                    own = weight / total * self.method.scale
                    parts.append((factors.b.double() * own, factors.a.double()))
            if parts:
                yield name, LowRankChange(torch.cat([b for b, _ in parts], 1), torch.cat([a for _, a in parts]))

    def _lift(
        self, include: Sequence[str] | None, exclude: Sequence[str], options: Mapping[str, Any]
    ) -> Iterator[tuple[str, LowRankChange]]:
        """The factors that are merged in the experts' joint subspace."""
        assert isinstance(self.method, SubspaceMethod)
        inputs = open_inputs(self.base, self.experts, self.method, None, include, exclude)
        frame, jobs = merge_coordinates(inputs, self.method, options.get("device", "cpu"), options.get("notes"))
        for results in jobs:
            for name, coordinates in results:
                yield name, frame.find_basis(name).lift(coordinates)

    def _keep(self, name: str, change: LowRankChange | Tensor) -> LowRankChange:
        """A change within the rank and the energy that are asked for; counts what is lost."""
        if isinstance(change, LowRankChange):
            whole = float(((change.b.mT @ change.b) * (change.a @ change.a.mT)).sum())
            fits = self.energy is None and len(change.a) <= (self.rank or math.inf)
            change = change if fits else change.b @ change.a
        else:
            whole = float(change.square().sum())
        if not math.isfinite(whole):
            raise InputError(
                f"the merged change of {name} holds NaN or infinite entries: check the adapters' factors"
            )
        self._whole += whole
        change = self._cut(change) if isinstance(change, Tensor) else change
        self.ranks[name] = len(change.a)
        return change

    def _cut(self, change: Tensor) -> LowRankChange:
        u, s, v = svd(change)
        energies = s.square()
        kept = len(s) if self.rank is None else min(self.rank, len(s))
        if self.energy is not None:
            enough = torch.searchsorted(energies.cumsum(0), self.energy * float(energies.sum()) * (1 - 1e-12))
            kept = min(kept, int(enough) + 1)
        lost = float(energies[kept:].sum())
        self._lost += lost
        self.exact &= lost <= _ROUNDING * float(energies.sum())
        root = s[:kept].sqrt()
        return LowRankChange(u[:, :kept] * root, (v[:, :kept] * root).mT)
