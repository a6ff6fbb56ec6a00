"""The base of the methods that merge matrices in a joint subspace of all experts.

What the experts add to a matrix gets a common basis. Their coordinates in it are merged by another method, as
if they were task vectors of a base of zeros, with whatever that method surveys of the whole model; the result
is taken back. Of experts that are plain LoRA adapters nothing but their factors is read: the merge has low
rank.

Legend: `T` experts, `m×n` a matrix `[out, in]`, `k`, `l` directions of its basis.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from mergekit_lab.checkpoints import Checkpoint, TensorSpec, find_adapter
from mergekit_lab.checkpoints.adapter_writing import LowRankChange
from mergekit_lab.checkpoints.adapters import Folded
from mergekit_lab.checkpoints.checkpoint import Entry, View
from mergekit_lab.errors import InputError
from mergekit_lab.merging.factorizations import solve_one
from mergekit_lab.merging.inputs import Inputs
from mergekit_lab.merging.sparsified import WrappingMethod

Changes = Callable[[], Iterator[LowRankChange | Tensor]]
"""Starts a pass over what the experts add to a matrix, in order: `[m, n]`, or its factors; all in float64. An
expert that adds nothing has factors of rank 0, or zeros."""


@dataclass(frozen=True)
class MatrixBasis:
    """Directions of one matrix.

    Attributes:
        left: `[m, k]`, orthonormal columns.
        right: `[n, l]`, the same; None: all of the inputs.
        scales: `[k]`, what `k` rows of coordinates are divided by before they are merged, and multiplied by
            after it; None: 1.
    """

    left: Tensor
    right: Tensor | None = None
    scales: Tensor | None = None

    def project(self, change: LowRankChange | Tensor) -> Tensor:
        """The coordinates of a change, `[k, l]`."""
        left = self.left if self.scales is None else self.left / self.scales
        if isinstance(change, LowRankChange):
            a = change.a if self.right is None else change.a @ self.right
            return (left.mT @ change.b) @ a
        coordinates = left.mT @ change
        return coordinates if self.right is None else coordinates @ self.right

    def lift(self, coordinates: Tensor) -> LowRankChange:
        """The change that has these coordinates, `[k, l]`."""
        wide = coordinates.to(self.left)
        left = self.left if self.scales is None else self.left * self.scales
        return LowRankChange(left, wide if self.right is None else wide @ self.right.mT)


@dataclass(frozen=True, kw_only=True)
class SubspaceMethod(WrappingMethod):
    """`θ0 + lift(inner(coordinates))` for 2-D tensors; `inner` of the task vectors themselves for all others.

    Args:
        inner: the method that merges coordinates; coefficient and weights are its own.

    Raises:
        InputError: an inner method that reads side inputs, which have no coordinates.
    """

    stands_alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.side_inputs:
            raise InputError(
                f"{type(self).__name__} merges coordinates, and {type(self.inner).__name__} reads side "
                "inputs of entries: choose another inner method"
            )

    def find_basis(self, changes: Changes) -> MatrixBasis:
        """The directions in which the experts' changes of one matrix are merged."""
        raise NotImplementedError


class LeftDirections:
    """Matrices `[m, c]` side by side, in float64; more columns than rows become a triangle on the way."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def add(self, block: Tensor) -> None:
        rows = block.mT if self._rows is None else torch.cat([self._rows, block.mT])
        self._rows = torch.linalg.qr(rows, mode="r").R if rows.shape[0] > rows.shape[1] else rows

    def find(self) -> tuple[Tensor, Tensor]:
        """Their left singular vectors `[m, k]` and singular values `[k]`, `k` the smaller side; once."""
        assert self._rows is not None
        rows, self._rows = self._rows, None
        return solve_one(rows.mT, len(rows), overwrite=True)[:2]


class Frame:
    """The bases of a merge's matrices, found when they are asked for.

    A basis is not kept, but for the last one a thread asked for: of adapters it is cheap, and of dense experts
    as large as a matrix.

    Args:
        inputs: of the merge.
        method: what finds bases.
        device: where they are found.

    Attributes:
        inputs: the merge of coordinates: of matrices that any expert changes, and other tensors as they are.
        shapes: of the coordinates of each matrix.
    """

    def __init__(self, inputs: Inputs, method: SubspaceMethod, device: torch.device) -> None:
        self.device = device
        self._inputs, self._method = inputs, method
        self._last = threading.local()
        self._adapters = find_plain_adapters(inputs.experts)
        self.shapes: dict[str, tuple[int, int]] = {}
        merged: list[str] = []
        for name in inputs.merged:
            if len(inputs.base.specs[name].shape) == 2:
                basis = self.find_basis(name)
                if not basis.left.shape[1]:
                    continue
                inputs_of = basis.right.shape[1] if basis.right is not None else self._orient(name)[1]
                self.shapes[name] = basis.left.shape[1], inputs_of
                merged.append(name)
            elif not self._adapters:
                merged.append(name)
        specs = {name: TensorSpec(shape, inputs.compute) for name, shape in self.shapes.items()}

        def replace_matrices(model: Checkpoint, read: Callable[[str], Tensor]) -> View:
            matrices = {name: Entry(spec, partial(read, name)) for name, spec in specs.items()}
            return View(model, {**model.list_entries(), **matrices})

        experts = {e: replace_matrices(x, partial(self.project, expert=e)) for e, x in inputs.experts.items()}
        base = replace_matrices(inputs.base, self._make_zeros)
        oriented = inputs.transposed - self.shapes.keys()
        self.inputs = replace(
            inputs, base=base, experts=experts, merged=tuple(merged), transposed=oriented, computed=True
        )

    def find_basis(self, name: str) -> MatrixBasis:
        if getattr(self._last, "name", None) != name:
            self._last.basis = None
            self._last.basis = self._method.find_basis(
                lambda: (self._read_change(name, expert) for expert in self._inputs.experts)
            )
            self._last.name = name
        basis: MatrixBasis = self._last.basis
        return basis

    def project(self, name: str, expert: str) -> Tensor:
        """`[k, l]` of an expert, in the precision of the merge."""
        basis = self.find_basis(name)
        coordinates = basis.project(self._read_change(name, expert))
        return coordinates.to(self._inputs.base[name].device, self._inputs.compute)

    def _make_zeros(self, name: str) -> Tensor:
        device = self._inputs.base[name].device
        return torch.zeros(self.shapes[name], dtype=self._inputs.compute, device=device)

    def _read_change(self, name: str, expert: str) -> LowRankChange | Tensor:
        def widen(values: Tensor) -> Tensor:
            return values.to(self.device, torch.float64)

        change: LowRankChange | Tensor
        if self._adapters:
            out, into = self._orient(name)
            nothing = LowRankChange(torch.zeros(out, 0), torch.zeros(0, into))
            factors = self._adapters[expert].read_factors(name) or nothing
            change = LowRankChange(widen(factors.b), widen(factors.a))
        else:
            dense = widen(self._inputs.experts[expert][name]) - widen(self._inputs.base[name])
            change = dense.mT if name in self._inputs.transposed else dense
        for part in change if isinstance(change, LowRankChange) else (change,):
            if not bool(part.isfinite().all()):
                self._inputs.refuse_non_finite([name])
        return change

    def _orient(self, name: str) -> tuple[int, int]:
        rows, columns = self._inputs.base.specs[name].shape
        return (columns, rows) if name in self._inputs.transposed else (rows, columns)


def find_plain_adapters(experts: Mapping[str, Checkpoint]) -> dict[str, Folded]:
    """The experts as adapters that only add `B·A` to weights of linear layers; nothing unless all are."""
    adapters = {name: find_adapter(expert) for name, expert in experts.items()}
    plain = {
        name: folded
        for name, folded in adapters.items()
        if folded is not None and folded.is_plain and set(folded) == set(experts[name])
    }
    return plain if len(plain) == len(experts) else {}
