"""Move the rows of embeddings to where the result's vocabulary has their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import Checkpoint, Entry, TensorSpec, View
from mergekit_lab.errors import InputError, join_names


@dataclass(frozen=True)
class TokenSource:
    """Where a token's row comes from in models that lack it.

    Attributes:
        position: of the model it is in: 0 is the base, 1 the first expert; None: the row is zero.
        token: its name or row there; None: the same name.
        forced: whether models that have the token get that row too.
    """

    position: int | None
    token: str | int | None = None
    forced: bool = False


@dataclass(frozen=True)
class TokenPlan:
    """How a mergekit recipe unites vocabularies.

    Every model keeps its own rows. One that it lacks is the base's, or the mean of the models that have it.

    Attributes:
        tokens: exceptions, by token; those that no model has become new ones.
        multiple: the rows are filled up to a multiple of this with the mean of the others.
        based: whether the base counts before other models.
    """

    tokens: Mapping[str, TokenSource] = field(default_factory=dict)
    multiple: int = 1
    based: bool = True


@dataclass(frozen=True)
class Reconciled:
    """Checkpoints with one vocabulary.

    Attributes:
        base, experts: what to merge.
        exclude: names that stay the base's.
        rows: of the vocabulary that comes out, if it is not the base's.
        tokenizer: the folder whose tokenizer fits it, if that is not the base's.
        added: entries of `added_tokens` that its `tokenizer.json` needs besides its own.
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
    added: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Vocabularies:
    """Models under the same names, the base first, and their tokens.

    Attributes:
        every: the models.
        names: of tensors with one row a token.
        tokens: row of each token in each model; None where its tokenizer cannot be read.
    """

    every: tuple[Checkpoint, ...]
    names: Sequence[str]
    tokens: Sequence[dict[str, int] | None]

    def count_rows(self, position: int) -> int:
        return self.every[position].specs[self.names[0]].shape[0]

    def count_rows_of(self, folder: Path) -> int:
        """The number of rows of the largest vocabulary among models of this folder; 0 if there are none."""
        every = enumerate(self.every)
        return max((self.count_rows(n) for n, model in every if model.folder == folder), default=0)


@dataclass(frozen=True)
class RowMap:
    """Which row of each model is which row of the result."""

    models: Vocabularies
    rows: int
    wanted: dict[str, int] | None
    plan: TokenPlan | None = None
    padding: int = 0
    _maps: dict[int, Tensor] = field(default_factory=dict)
    _new: dict[str, Tensor] = field(default_factory=dict)

    def map(self, position: int) -> Tensor:
        """For each row of the result, the row in model `position` (0 is the base), or −1 if it has none."""
        if position not in self._maps:
            own, size = self.models.tokens[position], self.models.count_rows(position)
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

    @cached_property
    def _fill(self) -> Tensor:
        """`[models, rows]`: what models that lack a row of the result get is the mean of these rows of the
        checkpoints, −1 for a checkpoint that has no part in it.
        """
        rows = torch.stack([self.map(position) for position in range(len(self.models.every))])
        plan = self.plan or TokenPlan()
        if plan.based:
            rows[1:, rows[0] >= 0] = -1
        else:
            rows[0, (rows[1:] >= 0).any(0)] = -1
        wanted = self.wanted or {}
        for token, source in plan.tokens.items():
            row = wanted[token]
            rows[:, row] = -1
            if source.position is not None:
                rows[source.position, row] = self._find_row(token, source.position, source.token)
        return rows

    @cached_property
    def _mixed(self) -> Tensor:
        """Which rows of the result some model lacks and gets from experts' rows."""
        owned = torch.stack([self.takes(position) for position in range(len(self.models.every))])
        return ~owned.all(0) & (self._fill[1:] >= 0).any(0)

    def _find_row(self, token: str, position: int, source: str | int | None) -> int:
        known = self.models.tokens[position] or {}
        row = known.get(token if source is None else source) if not isinstance(source, int) else source
        if row is None or not 0 <= row < self.models.count_rows(position):
            missing = repr(token) if source is None else f"{source!r}, which is to be {token!r}"
            raise InputError(f"{self.models.every[position].label!r} has no row for the token {missing}")
        return row

    def takes(self, position: int) -> Tensor:
        """Which rows of the result a checkpoint has itself."""
        has = self.map(position) >= 0
        if self.plan is None or self.wanted is None:
            return has & (self.map(0) >= 0)
        has[[self.wanted[token] for token, source in self.plan.tokens.items() if source.forced]] = False
        return has

    def move(self, position: int, name: str) -> Tensor:
        """The tensor of a checkpoint with the result's rows."""
        base = self.models.every[0][name]
        values = self.models.every[position][name] if position else base
        out = base.new_zeros((self.rows, *base.shape[1:]), dtype=torch.promote_types(base.dtype, values.dtype))
        mine, same, mixed = self.takes(position), self._fill[0], self._mixed
        out[same >= 0] = base[same[same >= 0]].to(out.dtype)
        if bool(mixed.any()):
            if name not in self._new:
                self._new[name] = self._average(name, mixed)
            out[mixed] = self._new[name].to(out.dtype)
        out[mine] = values[self.map(position)[mine]].to(out.dtype)
        if self.padding:
            exact = torch.promote_types(out.dtype, torch.float32)
            out[-self.padding :] = out[: -self.padding].mean(0, dtype=exact).to(out.dtype)
        return out

    def _average(self, name: str, at: Tensor) -> Tensor:
        shape = (int(at.sum()), *self.models.every[0].specs[name].shape[1:])
        total, count = torch.zeros(shape), torch.zeros(shape[0], *[1] * (len(shape) - 1))
        for checkpoint, rows in zip(self.models.every, self._fill[:, at], strict=True):
            has = rows >= 0
            if bool(has.any()):
                total[has] += checkpoint[name][rows[has]].float()
                count[has] += 1
        return total / count.clamp(min=1)

    def move_side(self, position: int, checkpoint: Checkpoint) -> Checkpoint:
        """A side input shaped like the expert's tensors: nothing is known of rows that the expert lacks."""

        def read(name: str) -> Tensor:
            values = checkpoint[name]
            out = values.new_zeros((self.rows, *values.shape[1:]))
            mine = self.takes(position + 1)
            out[mine] = values[self.map(position + 1)[mine]]
            return out

        specs = {name: checkpoint.specs[name] for name in self.models.names if name in checkpoint}
        entries = {name: self._resize(spec, spec.dtype, partial(read, name)) for name, spec in specs.items()}
        return View(checkpoint, {**checkpoint.list_entries(), **entries})

    def _resize(self, spec: TensorSpec, dtype: torch.dtype, read: Callable[[], Tensor]) -> Entry:
        return Entry(TensorSpec((self.rows, *spec.shape[1:]), dtype), read)

    def _view(self, position: int) -> Checkpoint:
        base, model = self.models.every[0], self.models.every[position]
        entries = model.list_entries()
        for name in self.models.names:
            spec = entries[name].spec
            dtype = torch.promote_types(base.specs[name].dtype, spec.dtype)
            entries[name] = self._resize(spec, dtype, partial(self.move, position, name))
        return View(model, entries)

    def reconcile(self, tokenizer: Path | None) -> Reconciled:
        len(self._fill)  # refuses what cannot be found
        models = self.models
        base, *experts = map(self._view, range(len(models.every)))
        by = "row" if self.wanted is None or None in models.tokens else "token"
        notes = [f"{join_names(models.names)}: {self.rows} rows, matched by {by}"]
        for position, expert in enumerate(experts, 1):
            size, used = models.count_rows(position), int((self.map(position) >= 0).sum())
            if not used:
                raise InputError(
                    f"no token of {expert.label!r} is in the vocabulary of the result: is its tokenizer right?"
                )
            notes.append(f"{expert.label}: {used} of its {size} rows are in the result")
        before, after = models.tokens[0], self.wanted
        if before and after and after is not before:
            moved = [token for token, row in before.items() if after.get(token, row) != row]
            if moved:
                notes.append(
                    f"warning: {len(moved)} tokens of the base have other rows in the result "
                    f"({join_names(moved, 4)}); ids in config.json other than begin, end and padding are still "
                    "the base's"
                )
        rows = self.rows if self.rows != models.count_rows(0) else None
        return Reconciled(base, tuple(experts), (), rows, tokenizer, self.move_side, tuple(notes))
