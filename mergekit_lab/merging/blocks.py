"""A merge's inputs in pieces, on one device: whole tensors, or flat blocks of one or several.

Legend: `T` experts, `*S` a tensor's shape, `n` a block's length.
"""

import math
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from mergekit_lab.merging.contract import Method, Segment, Site
from mergekit_lab.merging.inputs import Inputs
from mergekit_lab.merging.transfers import fill, send_whole
from mergekit_lab.prefetch import prefetch

CPU_BLOCK = 1 << 18
"""Entries of a block on a CPU: few enough that T blocks in float32 stay in the cache, and enough that threads
seldom wait for each other between two operations."""
DEVICE_BLOCK = 1 << 23
"""Entries of a block on an accelerator, where few large launches are faster. Small tensors are pooled up to
this size. If the host feeds the device, blocks have half the size, because each of many workers holds one."""


def size_block(device: torch.device) -> int:
    """Entries of a block on this device."""
    return CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK


def cut_rows(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices of `rows` rows, each with as many rows of this width as a block has room for."""
    step = max(1, size_block(device) // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


_AHEAD = 8
"""Blocks that are read ahead from the host's memory for an accelerator."""

Notes = dict[str, dict[str, object]]


@dataclass(frozen=True)
class Reader:
    """Reads a merge's inputs in pieces, onto one device. Surveys get it as their `Stream`.

    Inputs that must not be merged (NaN, infinity, a negative Fisher) are found late on purpose. Each check
    (`expect_finite`, …) leaves a 0-d boolean on the device, together with a function that raises the error.
    `settle` reads all booleans at once, so that an accelerator is waited for once and not for every block. On a
    CPU every check settles at once.

    Attributes:
        inputs: what is read.
        method: the method that merges it.
        device: where blocks go.
        changes: applied to the task vectors of every block of a survey.
        notes: the method's diagnostics.
        sharing: the devices that may share a survey. One may be listed more than once.
        subset: the tensors of a survey; None: all that are merged.
        turn: the device's lock for factorizations. Other workers of the device read meanwhile.
    """

    inputs: Inputs
    method: Method
    device: torch.device
    changes: tuple[Callable[[str, Tensor, Site], Tensor], ...] = ()
    notes: Notes = field(default_factory=dict)
    sharing: tuple[torch.device, ...] = ()
    subset: tuple[str, ...] | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    _doubts: list[tuple[Tensor, Callable[[], None]]] = field(default_factory=list, init=False)
    _rows: dict[str, list[Tensor]] = field(default_factory=dict, init=False)
    _memory: dict[str, Tensor] = field(default_factory=dict, init=False)
    _known_weights: dict[str, tuple[Tensor, bool]] = field(default_factory=dict, init=False)

    @property
    def experts(self) -> tuple[str, ...]:
        return tuple(self.inputs.experts)

    @property
    def entries(self) -> int:
        return sum(self.inputs.base.specs[name].numel for name in self.names)

    @property
    def buffer_entries(self) -> int:
        return sum(s.numel for s in self.inputs.base.specs.values() if not s.dtype.is_floating_point)

    @cached_property
    def block(self) -> int:
        """The most entries of a flat block."""
        return size_block(self.device) >> self.fed

    def map(self, change: Callable[[str, Tensor, Site], Tensor]) -> Self:
        return replace(self, changes=(*self.changes, change))

    def select(self, keep: Callable[[str, Sequence[int]], bool]) -> Self:
        def is_kept(name: str) -> bool:
            stack = self.inputs.stacks.get(name)
            if stack is None:
                return keep(name, self.inputs.base.specs[name].shape)
            return keep(stack.members[0], stack.shape)

        return replace(self, subset=tuple(filter(is_kept, self.names)))

    def divide(self) -> list[Self]:
        if len(self.sharing) < 2:
            return [self]
        specs = self.inputs.base.specs
        parts: list[list[str]] = [[] for _ in self.sharing]
        sizes = [0] * len(parts)
        for name in sorted(self.names, key=lambda name: -specs[name].numel):
            least = sizes.index(min(sizes))
            parts[least].append(name)
            sizes[least] += specs[name].numel
        return [
            replace(self, device=device, sharing=(), subset=tuple(part))
            for device, part, size in zip(self.sharing, parts, sizes, strict=True)
            if size
        ]

    @property
    def names(self) -> Sequence[str]:
        return self.inputs.merged if self.subset is None else self.subset

    def read_blocks(self) -> Iterator[tuple[str, Tensor, Site]]:
        for piece, deltas in self._read_blocks():
            site = self.make_site(piece)
            for change in self.changes:
                deltas = change(piece[0].name, deltas, site)
            yield piece[0].name, deltas, site

    def _read_blocks(self) -> Iterator[tuple[list[Segment], Tensor]]:
        """Every block with its task vectors. For an accelerator, they are read ahead from the host's memory."""
        pieces = self.cut(self.names)
        if not self.fed:
            reader = self if self._resident else replace(self)
            for piece in pieces:
                yield piece, reader.read(piece)[1]
            return
        readers = threading.local()

        def read(piece: list[Segment]) -> tuple[list[Segment], Tensor]:
            if not hasattr(readers, "mine"):
                readers.mine = replace(self)
            return piece, readers.mine.read(piece)[1]

        yield from prefetch(read, pieces, ahead=_AHEAD, threads=_AHEAD)

    def read_side_blocks(self, kind: str) -> Iterator[Tensor]:
        for piece in self.cut(self.names):
            yield self.read_block_sides(piece)[kind]

    @cached_property
    def fed(self) -> bool:
        """Whether this is an accelerator whose inputs are in the host's memory."""
        home = self.inputs.home
        return self.device.type != "cpu" and home is not None and home.type == "cpu"

    @cached_property
    def _resident(self) -> bool:
        """Whether the inputs are in this accelerator's memory, so that keeping them open costs nothing."""
        return self.device.type != "cpu" and self.inputs.home == self.device and not self.inputs.computed

    def cut(self, names: Sequence[str]) -> Iterator[list[Segment]]:
        """Cut tensors into flat blocks: of one tensor each, or of several small ones if the method pools."""
        block, pools = self.block, self.pools
        pool: list[Segment] = []
        room = 0
        for name in names:
            size = self.inputs.base.specs[name].numel
            for start in range(0, size, block):
                stop = min(start + block, size)
                if pool and (not pools or stop - start > room):
                    yield pool
                    pool = []
                if not pool:
                    room = block
                pool.append(Segment(name, start, stop))
                room -= stop - start
        if pool:
            yield pool

    @cached_property
    def pools(self) -> bool:
        """Whether blocks hold several tensors."""
        return self.method.pools and not self._weighs_by_tensor and self.device.type != "cpu"

    def read(self, piece: list[Segment]) -> tuple[Tensor, Tensor]:
        """`θ0` `[n]` and `δ` `[T, n]` of a block. On a CPU they are valid until the next block is read."""
        first, *rows = zip(*map(self._read_segment, piece), strict=True)
        size = sum(s.stop - s.start for s in piece)
        base, deltas = self._allocate("base", 1, size), self._allocate("deltas", len(rows), size)
        if len(piece) > 1 or any(row[0].device != base.device for row in (first, *rows)):
            fill(base, [first])
            fill(deltas, rows)
            return base[0], deltas.sub_(base)
        one, *each = (row[0].reshape(-1) for row in (first, *rows))
        if all(values.dtype == base.dtype for values in each):
            base[0].copy_(one)
            for slot, values in zip(deltas, each, strict=True):
                torch.sub(values, base[0], out=slot)
            return base[0], deltas
        torch._foreach_copy_([base[0], *deltas.unbind()], [one, *each])
        return base[0], deltas.sub_(base)

    def _read_segment(self, segment: Segment) -> list[Tensor]:
        """A segment of the base and of every expert: a whole tensor in its own shape, or a flat range."""
        size = segment.stop - segment.start
        rows = self._rows.get(segment.name)
        if rows is None:
            if not self._resident:
                self._rows.clear()
            rows = [model[segment.name] for model in (self.inputs.base, *self.inputs.experts.values())]
            if size < rows[0].numel():
                rows = [row.reshape(-1) for row in rows]
            self._rows[segment.name] = rows
        return rows if size == rows[0].numel() else [row.narrow(0, segment.start, size) for row in rows]

    def _allocate(self, use: str, rows: int, size: int) -> Tensor:
        """An uninitialized `[rows, size]`. On a CPU all blocks reuse one buffer: new pages cost more than the
        arithmetic.
        """
        if self.device.type != "cpu":
            return torch.empty((rows, size), dtype=self.inputs.compute, device=self.device)
        if use not in self._memory or self._memory[use].numel() < rows * size:
            self._memory[use] = torch.empty(rows * size, dtype=self.inputs.compute)
        return self._memory[use][: rows * size].view(rows, size)

    def read_base(self, name: str) -> Tensor:
        """`θ0` `[*S]` of a tensor, on the device in its own dtype. Do not write into it."""
        return send_whole(self.inputs.base[name], self.device)

    def read_deltas(self, name: str, base: Tensor) -> Tensor:
        """`δ` `[T, *S]` of a tensor, given its `θ0`."""
        deltas = self._stack([[e[name].reshape(-1)] for e in self.inputs.experts.values()])
        deltas.sub_(base.reshape(-1).to(deltas.dtype))
        self.expect_finite([name], deltas)
        return deltas.view(len(deltas), *base.shape)

    def make_whole_site(self, name: str, survey: Any) -> Site:
        whole = Segment(name, 0, self.inputs.base.specs[name].numel)
        sides = {kind: (name, rows) for kind, rows in self.inputs.read_sides(name).items()}
        return self.make_site([whole], self._read_late(sides), survey)

    def make_member_site(self, name: str, number: int, survey: Any) -> Site:
        """The site of one matrix of a stack, as if it were a tensor. Its weights are the stack's."""
        stack = self.inputs.stacks[name]
        member, size = stack.members[number], math.prod(stack.shape)
        part = Segment(name, number * size, (number + 1) * size)
        sides = {kind: (member, rows) for kind, rows in self.inputs.read_sides(member).items()}
        for kind, rows in self.inputs.read_sides(name).items():
            if self.inputs.name_side(kind, name) == name:
                own = [row.reshape(-1)[part.start : part.stop].view(stack.shape) for row in rows]
                sides[kind] = name, own
        site = self.make_site([part], self._read_late(sides), survey)
        segments = (Segment(member, 0, size),)
        return replace(site, segments=segments, note=self._write_notes(member), transposed=stack.transposed)

    def make_site(
        self,
        segments: Sequence[Segment],
        side: Mapping[str, Tensor] = MappingProxyType({}),
        survey: Any = None,
        tensor: Any = None,
    ) -> Site:
        """The site of a block."""
        name = segments[0].name
        weights, unit = self._resolve_weights(name)
        transposed = name in self.inputs.transposed
        note = self._write_notes(name)
        return Site(self.experts, weights, tuple(segments), side, survey, tensor, note, unit, transposed)

    def _write_notes(self, name: str) -> Callable[[str, object], None]:
        def note(key: str, value: object) -> None:
            self.notes.setdefault(name, {})[key] = value

        return note

    def _resolve_weights(self, name: str) -> tuple[Tensor, bool]:
        """`λ` of a tensor, and whether all are 1. Computed once, unless weights differ between tensors."""
        key = name if self._weighs_by_tensor else ""
        if key not in self._known_weights:
            values = self.method.weigh_experts(self.experts, name)
            tensor = torch.tensor(values, dtype=self.inputs.compute, device=self.device)
            self._known_weights[key] = tensor, all(value == 1 for value in values)
        return self._known_weights[key]

    @cached_property
    def _weighs_by_tensor(self) -> bool:
        return self.method.weights_by_tensor

    def read_block_sides(self, piece: list[Segment]) -> dict[str, Tensor]:
        """The side inputs of a block by kind, `[T, n]` each."""
        by_segment = [(s, self.inputs.read_sides(s.name)) for s in piece]
        sides = {}
        for kind in by_segment[0][1]:
            parts = [[row.reshape(-1)[s.start : s.stop] for row in rows[kind]] for s, rows in by_segment]
            sides[kind] = self._stack(list(zip(*parts, strict=True)))
            self._check_side(kind, [s.name for s in piece], sides[kind])
        return sides

    def _read_late(self, sides: Mapping[str, tuple[str, list[Tensor]]]) -> Mapping[str, Tensor]:
        """A tensor's whole side inputs by kind, given its name there and each expert's tensor; see `_Sides`."""

        def read(kind: str, name: str, rows: list[Tensor]) -> Tensor:
            values = self._stack([[row.reshape(-1)] for row in rows]).view(len(rows), *rows[0].shape)
            self._check_side(kind, [name], values)
            return values

        late = _Sides({kind: partial(read, kind, *side) for kind, side in sides.items()})
        return late if self.device.type == "cpu" else dict(late)

    def _check_side(self, kind: str, names: list[str], values: Tensor) -> None:
        """Expect side inputs `[T, …]` to be finite, and a Fisher to be at least 0."""
        if not values.numel():
            return
        low, high = torch.aminmax(values)
        sound = low.isfinite() & high.isfinite()
        if kind == "fisher":
            sound &= low >= 0
        self._doubt(~sound, partial(self.inputs.refuse_side, kind, names))

    def _stack(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        size = sum(part.numel() for part in rows[0])
        out = torch.empty((len(rows), size), dtype=self.inputs.compute, device=self.device)
        fill(out, rows)
        return out

    def expect_finite(self, names: list[str], deltas: Tensor) -> None:
        """Expect all entries of `[T, n]` to be finite; `settle` raises if one is not."""
        if self.device.type == "cpu" and math.isfinite(deltas.sum()):
            return  # the sum is not finite if an entry is not; it may also overflow, so that is checked below
        size = deltas.shape[1]
        zeros = self._zeros[:size] if size <= self.block else deltas.new_zeros(size)
        # 0·x is NaN if x is not finite. This takes one pass without a mask, much faster than isfinite on a CPU
        self._doubt((deltas @ zeros).isnan().any(), partial(self.inputs.refuse_non_finite, names))

    def expect_finite_result(self, name: str, merged: Tensor) -> None:
        """Expect a tensor's whole result `[*S]` to be finite. It may overflow although its inputs did not."""
        largest = torch.linalg.vector_norm(merged, math.inf)  # NaN if an entry is NaN; needs no memory
        self._doubt(~largest.isfinite(), partial(self.inputs.refuse_non_finite, [name]))

    @cached_property
    def _zeros(self) -> Tensor:
        return torch.zeros(self.block, dtype=self.inputs.compute, device=self.device)

    def _doubt(self, doubt: Tensor, refuse: Callable[[], None]) -> None:
        """Keep a check for `settle`: if the 0-d boolean `doubt` is true, `refuse` raises the error.

        `refuse` reads the inputs again to name the tensor, so that no block must be kept until then.
        """
        self._doubts.append((doubt, refuse))
        if self.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Evaluate all checks since the last call. This waits for an accelerator.

        Raises:
            InputError: NaN or infinite entries, or a negative Fisher.
        """
        doubts, self._doubts[:] = list(self._doubts), []
        if doubts and bool(torch.stack([doubt for doubt, _ in doubts]).any()):
            for doubt, refuse in doubts:
                if bool(doubt):
                    refuse()


class _Sides(UserDict[str, Any]):
    """A tensor's side inputs, each read when it is accessed: factorizations before that need the memory."""

    def __getitem__(self, kind: str) -> Tensor:
        values: Tensor = self.data[kind]()
        return values
