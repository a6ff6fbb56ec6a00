"""Experts with other vocabularies than the base: rows matched by token, never cut in silence.

An embedding, and the head that reads it back, have one row for each token. Where tokenizer files are there,
rows are matched by the token's string, else by their number; also where there are as many rows and other
tokens in them. A token without a row in its model does not count.

`intersect` keeps the base's vocabulary, `pad` takes the one of the tokenizer that knows every token, `base`
leaves these tensors out of the merge. A row that an expert lacks has no task vector there; a row that the base
lacks is the mean of the experts that have it, whatever the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec, View
from mergekit_lab.checkpoints.tied_weights import could_be_vocabulary, is_vocabulary_name
from mergekit_lab.checkpoints.tokens import other_tokenizer, read_tokens
from mergekit_lab.errors import InputError, listing, suggestion

CHOICES = ("intersect", "pad", "base")


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


def vocabulary_rows(checkpoint: Checkpoint) -> int | None:
    """Rows of a model's embedding; None where no tensor is called one."""
    specs = [s for n, s in checkpoint.specs.items() if is_vocabulary_name(n) and s.dtype.is_floating_point]
    return max((spec.shape[0] for spec in specs if len(spec.shape) == 2), default=None)


def vocabulary_names(base: Checkpoint, experts: Iterable[Checkpoint], *, resized: bool = True) -> list[str]:
    """Names of the base's tensors with one row a token.

    Args:
        resized: only those of which some expert has another number of rows.
    """
    every = (base, *experts)
    sizes = [{s.shape[0] for n, s in c.specs.items() if is_vocabulary_name(n) and s.shape} for c in every]
    found = []
    for name, spec in base.specs.items():
        shapes = [c.specs[name].shape for c in every if name in c.specs]
        if not spec.shape or not could_be_vocabulary(name) or len({(len(s), s[1:]) for s in shapes}) > 1:
            continue
        sized = [
            c.specs[name].shape[0] in rows for c, rows in zip(every, sizes, strict=True) if name in c.specs
        ]
        if all(sized) and (len(set(shapes)) > 1 or not resized):
            found.append(name)
    return found


def _rows_of_tokens(checkpoint: Checkpoint) -> dict[str, int] | None:
    """Row of each token that has one: a tokenizer may know more tokens than its model."""
    tokens, rows = read_tokens(checkpoint.folder), vocabulary_rows(checkpoint)
    if tokens is None or rows is None:
        return tokens
    return {token: row for token, row in tokens.items() if row < rows}


def reconcile(
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    choice: str | None = None,
    tokenizer: Path | None = None,
    is_merged: Callable[[str], bool] = lambda name: True,
) -> Reconciled:
    """Give all checkpoints one vocabulary.

    Args:
        base, experts: under the same names (see `align`).
        choice: one of `CHOICES`; None refuses a difference.
        tokenizer: the folder whose tokenizer the result gets (`pad` only); it must know every row that is kept.
        is_merged: whether a tensor is; without a choice, others may differ.

    Raises:
        InputError: vocabularies differ and no choice was made; `pad` without one tokenizer that fits.
    """
    if choice is not None and choice not in CHOICES:
        raise InputError(f"embeddings is {choice!r}{suggestion(choice, CHOICES)}")
    if choice is None and not any(map(is_merged, vocabulary_names(base, experts, resized=False))):
        return Reconciled(base, tuple(experts))
    same = _reconciled(base, experts, choice, tokenizer, is_merged)
    return replace(same, notes=(*same.notes, *_unread(base, experts)))


def _reconciled(
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    choice: str | None,
    tokenizer: Path | None,
    is_merged: Callable[[str], bool],
) -> Reconciled:
    names = [n for n in vocabulary_names(base, experts) if choice is not None or is_merged(n)]
    tokens = [_rows_of_tokens(checkpoint) for checkpoint in (base, *experts)]
    if tokens[0] is None and choice != "base":
        _refuse_contradictions(base, experts, tokens[1:])
    for position, expert in enumerate(experts, 1):
        if tokens[position] is None and vocabulary_rows(expert) == vocabulary_rows(base):
            tokens[position] = tokens[0]
    differ = any(own is not None and own != tokens[0] for own in tokens[1:])
    if (
        not names
        and differ
        and tokens[0] is not None
        and (choice is not None or not _are_in(tokens[0], tokens))
    ):
        names = vocabulary_names(base, experts, resized=False)
    if not names:
        return Reconciled(base, tuple(experts), notes=_lacking(experts, tokens))
    _check_one_size(names, (base, *experts))
    if choice is None:
        raise InputError(_choices(base, experts, names, tokens))
    if choice == "base":
        own = dict.fromkeys(names)
        views = tuple(
            View(e, {n: base.specs[n] if n in own else s for n, s in e.specs.items()}, _same(base, names))
            for e in experts
        )
        note = f"{listing(names)}: left out of the merge, the base's own"
        return Reconciled(base, views, tuple(names), notes=(note,), side=_blank_sides(base, names))
    if choice == "intersect":
        plan = _Rows(base, tuple(experts), names, tokens, base.specs[names[0]].shape[0], tokens[0])
        return plan.reconciled(None)
    return _padded(base, tuple(experts), names, tokens, tokenizer)


def _refuse_contradictions(
    base: Checkpoint, experts: Sequence[Checkpoint], tokens: Sequence[dict[str, int] | None]
) -> None:
    """Refuse experts of which one at least has not the rows of a base that has no tokenizer."""
    rows: dict[int, str] = {}
    places: dict[str, int] = {}
    for expert, own in zip(experts, tokens, strict=True):
        for token, row in (own or {}).items():
            if rows.setdefault(row, token) != token or places.setdefault(token, row) != row:
                raise InputError(
                    f"the tokenizer of {expert.label!r} has {token!r} in row {row}, unlike another "
                    f"expert's, and {base.label} has no tokenizer to decide: put the base's tokenizer files "
                    "next to it, or set embeddings=base"
                )


def _check_one_size(names: Sequence[str], checkpoints: Iterable[Checkpoint]) -> None:
    for checkpoint in checkpoints:
        sizes = {name: checkpoint.specs[name].shape[0] for name in names}
        if len(set(sizes.values())) > 1:
            raise InputError(f"{checkpoint.label!r} has vocabularies of several sizes ({sizes}): not supported")


def _same(base: Checkpoint, names: Iterable[str]) -> dict[str, Callable[[], Tensor]]:
    return {name: partial(base.__getitem__, name) for name in names}


def _blank_sides(base: Checkpoint, names: Sequence[str]) -> Callable[[int, Checkpoint], Checkpoint]:
    def fit(position: int, side: Checkpoint) -> Checkpoint:
        specs = {
            n: TensorSpec(base.specs[n].shape, s.dtype) if n in names else s for n, s in side.specs.items()
        }
        blank = {n: partial(torch.zeros, specs[n].shape, dtype=specs[n].dtype) for n in names if n in side}
        return View(side, specs, blank)

    return fit


def _describe(checkpoint: Checkpoint, base: Checkpoint, name: str) -> str:
    rows, wanted = checkpoint.specs[name].shape[0], base.specs[name].shape[0]
    return f"{checkpoint.label!r} has {rows} rows ({wanted} in the base)"


def _are_in(base: dict[str, int], tokens: Sequence[dict[str, int] | None]) -> bool:
    """Whether every token of the experts has the base's row: then rows belong together by number."""
    return all(own is None or own.items() <= base.items() for own in tokens)


def _choices(
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    names: Sequence[str],
    tokens: Sequence[dict[str, int] | None],
) -> str:
    lines = [f"the vocabularies differ in {listing(names)}:"]
    for expert, own in zip(experts, tokens[1:], strict=True):
        changed = [name for name in names if expert.specs[name].shape != base.specs[name].shape]
        if changed or (own is not None and own != tokens[0]):
            lines.append(f"  {_describe(expert, base, names[0])}{_differing(own, tokens[0])}")
    matched = (
        "their string" if all(t is not None for t in tokens) else "their row, as tokenizer files are missing"
    )
    lines += [
        f"Tokens would be matched by {matched}. Choose one of:",
        "  embeddings=intersect  the base's vocabulary; a token that an expert lacks gets no change from it, "
        "and tokens that only experts have are dropped",
        "  embeddings=pad        the vocabulary of the tokenizer that knows all tokens (tokenizer_from=… names "
        "it); tokens that the base lacks are the mean of the experts that have them",
        "  embeddings=base       these tensors stay the base's, only the others are merged",
    ]
    return "\n".join(lines)


def _differing(own: dict[str, int] | None, base: dict[str, int] | None) -> str:
    if own is None or base is None:
        return ""
    more, less = own.keys() - base.keys(), base.keys() - own.keys()
    moved = {token for token, row in base.items() if own.get(token, row) != row}
    kinds = {"only there": more, "only in the base": less, "in other rows": moved}
    said = [f"{len(names)} {where} ({listing(names, 4)})" for where, names in kinds.items() if names]
    return f"; tokens: {', '.join(said)}" if said else ""


def _lacking(experts: Sequence[Checkpoint], tokens: Sequence[dict[str, int] | None]) -> tuple[str, ...]:
    return tuple(
        f"warning: {expert.label!r} has as many rows{_differing(own, tokens[0])}: rows are merged by number"
        for expert, own in zip(experts, tokens[1:], strict=True)
        if own is not None and tokens[0] is not None and own != tokens[0]
    )


def _unread(base: Checkpoint, experts: Sequence[Checkpoint]) -> list[str]:
    """Tokenizers that are not compared because their files hold no list of tokens that is read here."""
    wanted = other_tokenizer(base.folder)
    return [
        f"warning: the tokenizer of {expert.label!r} is another file than the base's, and its tokens are not "
        "compared (save it as tokenizer.json with transformers): rows are merged by number"
        for expert in experts
        if other_tokenizer(expert.folder) not in (None, wanted)
    ]


def _padded(
    base: Checkpoint,
    experts: tuple[Checkpoint, ...],
    names: list[str],
    tokens: Sequence[dict[str, int] | None],
    tokenizer: Path | None,
) -> Reconciled:
    every = (base, *experts)
    if any(own is None for own in tokens):
        largest = max(every, key=lambda c: c.specs[names[0]].shape[0])
        rows = largest.specs[names[0]].shape[0]
        folder = tokenizer or (None if largest is base else largest.folder)
        return _Rows(base, experts, names, [None] * len(every), rows, None).reconciled(folder)
    known = [own for own in tokens if own is not None]
    union = set().union(*known)
    if tokenizer is not None:
        wanted = _wanted(tokenizer, every, known)
        nowhere = wanted.keys() - union
        if nowhere:
            raise InputError(
                f"no model has a row for {len(nowhere)} tokens of {tokenizer} ({listing(nowhere)})"
            )
        rows = max(
            max(wanted.values()) + 1, *(c.specs[names[0]].shape[0] for c in every if c.folder == tokenizer), 0
        )
        return _Rows(base, experts, names, tokens, rows, wanted).reconciled(tokenizer)
    for checkpoint, own in zip(every, known, strict=True):
        if own.keys() >= union:
            rows = checkpoint.specs[names[0]].shape[0]
            return _Rows(base, experts, names, tokens, rows, own).reconciled(
                None if checkpoint is base else checkpoint.folder
            )
    raise InputError(
        f"embeddings=pad: no tokenizer here knows all {len(union)} tokens: set tokenizer_from=… to a folder "
        "whose tokenizer does (an expert's name, if the other experts' own tokens may be dropped), "
        "or embeddings=intersect"
    )


def _wanted(tokenizer: Path, every: Sequence[Checkpoint], known: Sequence[dict[str, int]]) -> dict[str, int]:
    """The result's tokens: a model's own are those that have a row there."""
    for checkpoint, own in zip(every, known, strict=True):
        if checkpoint.folder == tokenizer:
            return own
    wanted = read_tokens(tokenizer)
    if wanted is None:
        raise InputError(f"tokenizer_from={tokenizer} has no tokenizer.json, vocab.json or vocab.txt")
    return wanted


@dataclass(frozen=True)
class _Rows:
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
            found = torch.full((self.rows,), -1)
            if own is None or self.wanted is None:
                found[: min(size, self.rows)] = torch.arange(min(size, self.rows))
            else:
                pairs = [(row, own[token]) for token, row in self.wanted.items() if token in own]
                pairs = [(row, mine) for row, mine in pairs if row < self.rows and mine < size]
                if pairs:
                    found[torch.tensor([row for row, _ in pairs])] = torch.tensor([mine for _, mine in pairs])
                if position == 0:
                    named = set(self.wanted.values())
                    spare = [r for r in range(min(size, self.rows)) if r not in named]
                    found[spare] = torch.tensor(spare, dtype=torch.int64)
            self._maps[position] = found
        return self._maps[position]

    def start(self, name: str) -> Tensor:
        """The base's tensor with the result's rows."""
        have = self.map(0) >= 0
        values = self.base[name]
        out = values.new_zeros((self.rows, *values.shape[1:]))
        out[have] = values[self.map(0)[have]]
        if not bool(have.all()):
            if name not in self._new:
                self._new[name] = self._mean(name, ~have)
            out[~have] = self._new[name].to(out.dtype)
        return out

    def _mean(self, name: str, at: Tensor) -> Tensor:
        shape = (int(at.sum()), *self.base.specs[name].shape[1:])
        total, count = torch.zeros(shape), torch.zeros(shape[0], *[1] * (len(shape) - 1))
        for position, expert in enumerate(self.experts, 1):
            source = self.map(position)[at]
            has = source >= 0
            if bool(has.any()):
                total[has] += expert[name][source[has]].float()
                count[has] += 1
        return total / count.clamp(min=1)

    def moved(self, position: int, name: str) -> Tensor:
        """An expert's tensor with the result's rows; the base's where one of the two has none."""
        out = self.start(name)
        both = (self.map(position) >= 0) & (self.map(0) >= 0)
        values = self.experts[position - 1][name]
        out = out.to(torch.promote_types(out.dtype, values.dtype))
        out[both] = values[self.map(position)[both]].to(out.dtype)
        return out

    def side(self, position: int, checkpoint: Checkpoint) -> Checkpoint:
        """A side input shaped like the expert's tensors: nothing is known of rows that the expert lacks."""
        names = [n for n in self.names if n in checkpoint]

        def read(name: str) -> Tensor:
            values = checkpoint[name]
            out = values.new_zeros((self.rows, *values.shape[1:]))
            both = (self.map(position + 1) >= 0) & (self.map(0) >= 0)
            out[both] = values[self.map(position + 1)[both]]
            return out

        return View(checkpoint, self._specs(checkpoint, names), {n: partial(read, n) for n in names})

    def _specs(self, checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, TensorSpec]:
        changed = {n: checkpoint.specs[n] for n in names}
        resized = {n: TensorSpec((self.rows, *s.shape[1:]), s.dtype) for n, s in changed.items()}
        return {name: resized.get(name, spec) for name, spec in checkpoint.specs.items()}

    def _view(self, checkpoint: Checkpoint, read: Mapping[str, Callable[[], Tensor]]) -> Checkpoint:
        specs = self._specs(checkpoint, read)
        for name in read:
            kinds = (self.base.specs[name].dtype, checkpoint.specs[name].dtype)
            specs[name] = TensorSpec(specs[name].shape, torch.promote_types(*kinds))
        return View(checkpoint, specs, read)

    def reconciled(self, tokenizer: Path | None) -> Reconciled:
        base = self._view(self.base, {n: partial(self.start, n) for n in self.names})
        experts = tuple(
            self._view(expert, {n: partial(self.moved, position, n) for n in self.names})
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
        return Reconciled(base, experts, (), rows, tokenizer, self.side, tuple(notes))
