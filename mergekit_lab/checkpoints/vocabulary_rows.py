"""Rows of a vocabulary moved to where the result has their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec, View
from mergekit_lab.errors import InputError, listing


@dataclass(frozen=True)
class Reconciled:
    """Checkpoints with one vocabulary.

    Attributes:
        base, experts: what to merge.
        exclude: names that stay the base's.
        rows: of the vocabulary that comes out, if it is not the base's.
        tokenizer: the folder whose tokenizer fits it, if that is not the base's.
        side: makes a side input of an expert, by position, fit as well.
        notes: sentences for a report.
    """

    base: Checkpoint
    experts: tuple[Checkpoint, ...]
    exclude: tuple[str, ...] = ()
    rows: int | None = None
    tokenizer: Path | None = None
    side: Callable[[int, Checkpoint], Checkpoint] = lambda position, checkpoint: checkpoint
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _RowMap:
    """Which row of each checkpoint is which row of the result."""

    base: Checkpoint
    experts: tuple[Checkpoint, ...]
    names: Sequence[str]
    tokens: Sequence[dict[str, int] | None]
    rows: int
    wanted: dict[str, int] | None
    _maps: dict[int, Tensor] = field(default_factory=dict)
    _new: dict[str, Tensor] = field(default_factory=dict)

    def map(self, position: int) -> Tensor:
        """Row of checkpoint `position` (0: the base) for each row of the result, −1 where it has none."""
        if position not in self._maps:
            checkpoint = (self.base, *self.experts)[position]
            own, size = self.tokens[position], checkpoint.specs[self.names[0]].shape[0]
            rows = torch.full((self.rows,), -1)
            if own is None or self.wanted is None:
                rows[: min(size, self.rows)] = torch.arange(min(size, self.rows))
            else:
                pairs = [(row, own[token]) for token, row in self.wanted.items() if token in own]
                pairs = [(row, mine) for row, mine in pairs if row < self.rows and mine < size]
                if pairs:
                    rows[torch.tensor([row for row, _ in pairs])] = torch.tensor([mine for _, mine in pairs])
                if position == 0:
                    named = set(self.wanted.values())
                    spare = [r for r in range(min(size, self.rows)) if r not in named]
                    rows[spare] = torch.tensor(spare, dtype=torch.int64)
            self._maps[position] = rows
        return self._maps[position]

    def start(self, name: str) -> Tensor:
        """The base's tensor with the result's rows."""
        have = self.map(0) >= 0
        values = self.base[name]
        out = values.new_zeros((self.rows, *values.shape[1:]))
        out[have] = values[self.map(0)[have]]
        if not bool(have.all()):
            if name not in self._new:
                self._new[name] = self._average(name, ~have)
            out[~have] = self._new[name].to(out.dtype)
        return out

    def _average(self, name: str, at: Tensor) -> Tensor:
        shape = (int(at.sum()), *self.base.specs[name].shape[1:])
        total, count = torch.zeros(shape), torch.zeros(shape[0], *[1] * (len(shape) - 1))
        for position, expert in enumerate(self.experts, 1):
            source = self.map(position)[at]
            has = source >= 0
            if bool(has.any()):
                total[has] += expert[name][source[has]].float()
                count[has] += 1
        return total / count.clamp(min=1)

    def move(self, position: int, name: str) -> Tensor:
        """An expert's tensor with the result's rows; the base's where one of the two has none."""
        out = self.start(name)
        both = (self.map(position) >= 0) & (self.map(0) >= 0)
        values = self.experts[position - 1][name]
        out = out.to(torch.promote_types(out.dtype, values.dtype))
        out[both] = values[self.map(position)[both]].to(out.dtype)
        return out

    def move_side(self, position: int, checkpoint: Checkpoint) -> Checkpoint:
        """A side input shaped like the expert's tensors: nothing is known of rows that the expert lacks."""
        names = [n for n in self.names if n in checkpoint]

        def read(name: str) -> Tensor:
            values = checkpoint[name]
            out = values.new_zeros((self.rows, *values.shape[1:]))
            both = (self.map(position + 1) >= 0) & (self.map(0) >= 0)
            out[both] = values[self.map(position + 1)[both]]
            return out

        return View(checkpoint, self._make_specs(checkpoint, names), {n: partial(read, n) for n in names})

    def _make_specs(self, checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, TensorSpec]:
        changed = {n: checkpoint.specs[n] for n in names}
        resized = {n: TensorSpec((self.rows, *s.shape[1:]), s.dtype) for n, s in changed.items()}
        return {name: resized.get(name, spec) for name, spec in checkpoint.specs.items()}

    def _view(self, checkpoint: Checkpoint, read: Mapping[str, Callable[[], Tensor]]) -> Checkpoint:
        specs = self._make_specs(checkpoint, read)
        for name in read:
            kinds = (self.base.specs[name].dtype, checkpoint.specs[name].dtype)
            specs[name] = TensorSpec(specs[name].shape, torch.promote_types(*kinds))
        return View(checkpoint, specs, read)

    def reconcile(self, tokenizer: Path | None) -> Reconciled:
        base = self._view(self.base, {n: partial(self.start, n) for n in self.names})
        experts = tuple(
            self._view(expert, {n: partial(self.move, position, n) for n in self.names})
            for position, expert in enumerate(self.experts, 1)
        )
        by = "row" if self.wanted is None or None in self.tokens else "token"
        notes = [f"{listing(self.names)}: {self.rows} rows, matched by {by}"]
        for position, expert in enumerate(self.experts, 1):
            size, used = expert.specs[self.names[0]].shape[0], int((self.map(position) >= 0).sum())
            if not used:
                raise InputError(
                    f"no token of {expert.label!r} is in the vocabulary of the result: is its tokenizer right?"
                )
            notes.append(f"{expert.label}: {used} of its {size} rows are in the result")
        before, after = self.tokens[0], self.wanted
        if before and after and after is not before:
            moved = [token for token, row in before.items() if after.get(token, row) != row]
            if moved:
                notes.append(
                    f"warning: {len(moved)} tokens of the base have other rows in the result "
                    f"({listing(moved, 4)}); ids in config.json other than begin, end and padding are still "
                    "the base's"
                )
        rows = self.rows if self.rows != self.base.specs[self.names[0]].shape[0] else None
        return Reconciled(base, experts, (), rows, tokenizer, self.move_side, tuple(notes))
