"""A merge's inputs in pieces, on one device: whole tensors, or flat blocks of one or several.

Legend: `T` experts, `*S` a tensor's shape, `n` a block's length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.errors import InputError, listing
from mergekit_lab.merging.contract import Method, Site
from mergekit_lab.merging.inputs import Inputs

CPU_BLOCK = 1 << 17
"""Entries of a tensor handed over at a time on a CPU: T of them in float32 stay in its cache."""
DEVICE_BLOCK = 1 << 24
"""The same on an accelerator, where few large launches are faster; small tensors are pooled up to it."""

Notes = dict[str, dict[str, object]]


@dataclass(frozen=True)
class Segment:
    """A flat range of a tensor."""

    name: str
    start: int
    stop: int


class Flat:
    """Base and experts as flat tensors.

    Args:
        inputs: where they are read.
        keep: keep them all open, which costs nothing where they lie in the device's memory anyway; else only
            those of the tensor that was read last.
    """

    def __init__(self, inputs: Inputs, keep: bool) -> None:
        self._checkpoints = (inputs.base, *inputs.experts.values())
        self._keep = keep
        self._rows: dict[str, list[Tensor]] = {}

    def parts(self, segment: Segment) -> list[Tensor]:
        """The segment of the base and of every expert."""
        rows = self._rows.get(segment.name)
        if rows is None:
            if not self._keep:
                self._rows.clear()
            rows = [checkpoint[segment.name].reshape(-1) for checkpoint in self._checkpoints]
            self._rows[segment.name] = rows
        if segment.stop - segment.start == rows[0].numel():
            return rows
        return [row[segment.start : segment.stop] for row in rows]


@dataclass(frozen=True)
class Reader:
    """The inputs in pieces, on one device. A `Stream` for surveys."""

    inputs: Inputs
    method: Method
    device: torch.device
    changes: tuple[Callable[[str, Tensor, Site], Tensor], ...] = ()
    notes: Notes = field(default_factory=dict)

    @property
    def experts(self) -> tuple[str, ...]:
        return tuple(self.inputs.experts)

    @property
    def entries(self) -> int:
        return sum(self.inputs.base.specs[name].numel for name in self.inputs.merged)

    @property
    def buffer_entries(self) -> int:
        return sum(s.numel for s in self.inputs.base.specs.values() if not s.dtype.is_floating_point)

    @property
    def block(self) -> int:
        return CPU_BLOCK if self.device.type == "cpu" else DEVICE_BLOCK

    def map(self, change: Callable[[str, Tensor, Site], Tensor]) -> Reader:
        return replace(self, changes=(*self.changes, change))

    def blocks(self) -> Iterator[tuple[str, Tensor, Site]]:
        flat = self.flat()
        for piece in self.pieces(self.inputs.merged):
            _, deltas = self.read(piece, flat)
            site = self.site(piece)
            for change in self.changes:
                deltas = change(piece[0].name, deltas, site)
            yield piece[0].name, deltas, site

    def side_blocks(self, kind: str) -> Iterator[Tensor]:
        for piece in self.pieces(self.inputs.merged):
            yield self._side(piece)[kind]

    def flat(self) -> Flat:
        """The inputs to read blocks from: one for all passes where they are on the device, else a new one."""
        return self._resident or Flat(self.inputs, keep=False)

    @cached_property
    def _resident(self) -> Flat | None:
        first = next(iter(self.inputs.merged), None)
        here = first is not None and self.device.type != "cpu" and self.inputs.base[first].device == self.device
        return Flat(self.inputs, keep=True) if here else None

    def pieces(self, names: Sequence[str]) -> Iterator[list[Segment]]:
        """Flat blocks: of one tensor each, or of several small ones where the method allows it."""
        pool: list[Segment] = []
        for name in names:
            size = self.inputs.base.specs[name].numel
            for start in range(0, size, self.block):
                segment = Segment(name, start, min(start + self.block, size))
                if pool and (not self.pools or _length(pool) + segment.stop - segment.start > self.block):
                    yield pool
                    pool = []
                pool.append(segment)
        if pool:
            yield pool

    @property
    def pools(self) -> bool:
        return self.method.pools and not self.method.weights_by_tensor and self.device.type != "cpu"

    def read(self, piece: list[Segment], flat: Flat) -> tuple[Tensor, Tensor]:
        """`θ0 [n]` and `δ [T, n]` of a block."""
        first, *rows = zip(*(flat.parts(segment) for segment in piece), strict=True)
        base = torch.empty(_length(piece), dtype=self.inputs.compute, device=self.device)
        _fill(base, first)
        return base, self._stack(rows).sub_(base)

    def whole(self, name: str) -> tuple[Tensor, Tensor]:
        """`θ0 [*S]` and `δ [T, *S]` of a tensor."""
        shape = self.inputs.base.specs[name].shape
        base = self.inputs.base[name].to(self.device, self.inputs.compute)
        deltas = self._stack([[e[name].reshape(-1)] for e in self.inputs.experts.values()])
        deltas.sub_(base.reshape(-1))
        self.check_finite([name], deltas)
        return base, deltas.view(-1, *shape)

    def site(self, piece: list[Segment], tensor: Any = None, survey: Any = None, side: bool = False) -> Site:
        """What belongs to a block; `side` reads the side inputs too."""
        sides = self._side(piece) if side else {}
        return self._site(piece[0].name, sides, piece[0].start, survey, tensor)

    def whole_site(self, name: str, survey: Any) -> Site:
        sides = {kind: self._tensors(rows) for kind, rows in self.inputs.sides(name).items()}
        for kind, values in sides.items():
            self._check_side(kind, [name], values)
        return self._site(name, sides, 0, survey, None)

    def _site(self, name: str, side: Mapping[str, Tensor], offset: int, survey: Any, tensor: Any) -> Site:
        def note(key: str, value: object) -> None:
            self.notes.setdefault(name, {})[key] = value

        weights = torch.tensor(
            self.method.expert_weights(self.experts, name), dtype=self.inputs.compute, device=self.device
        )
        return Site(self.experts, weights, offset, side, survey, tensor, note)

    def _side(self, piece: list[Segment]) -> dict[str, Tensor]:
        by_segment = [self.inputs.sides(s.name) for s in piece]
        experts = range(len(self.experts))
        sides = {
            kind: self._stack(
                [
                    [
                        found[kind][t].reshape(-1)[s.start : s.stop]
                        for s, found in zip(piece, by_segment, strict=True)
                    ]
                    for t in experts
                ]
            )
            for kind in by_segment[0]
        }
        for kind, values in sides.items():
            self._check_side(kind, [s.name for s in piece], values)
        return sides

    def _check_side(self, kind: str, names: list[str], values: Tensor) -> None:
        """Finite, and for a Fisher not negative; `values` are `[T, …]`."""

        def fault(part: Tensor) -> str | None:
            low, high = torch.stack(torch.aminmax(part)).tolist() if part.numel() else (0.0, 0.0)
            if not (math.isfinite(low) and math.isfinite(high)):
                return "NaN or infinite"
            return "negative" if kind == "fisher" and low < 0 else None

        if fault(values):
            for expert, row in zip(self.experts, values, strict=True):
                if found := fault(row):
                    raise InputError(f"the {kind} of {expert} holds {found} entries in ({listing(names)})")

    def _stack(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        size = sum(part.numel() for part in rows[0])
        out = torch.empty((len(rows), size), dtype=self.inputs.compute, device=self.device)
        for slot, parts in zip(out, rows, strict=True):
            _fill(slot, parts)
        return out

    def _tensors(self, rows: list[Tensor]) -> Tensor:
        return self._stack([[row.reshape(-1)] for row in rows]).view(-1, *rows[0].shape)

    def check_finite(self, names: list[str], deltas: Tensor) -> None:
        # 0·x is NaN where x is not finite: one pass without a mask, much faster than isfinite on a CPU
        if bool((deltas @ deltas.new_zeros(deltas.shape[1])).isnan().any()):
            self.inputs.refuse_non_finite(names)


def _length(piece: list[Segment]) -> int:
    return sum(segment.stop - segment.start for segment in piece)


def _fill(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy the parts, end to end, into the flat `out`."""
    if len(parts) == 1:
        out.copy_(parts[0])
    elif all(p.dtype == out.dtype and p.device == out.device for p in parts):
        torch.cat(list(parts), out=out)
    else:
        out.copy_(torch.cat(list(parts)))
