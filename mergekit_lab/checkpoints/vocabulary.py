"""Give experts and base one vocabulary. Rows are matched by token, and none is cut without a choice.

An embedding, and the head that reads it back, have one row for each token. Rows are matched by the tokens'
strings if tokenizer files are there, even if all models have as many rows; else by the rows' numbers. A token
of a tokenizer that has no row in its model does not count.

The user chooses: `intersect` keeps the base's vocabulary, `pad` takes that of the tokenizer that knows every
token, and `base` leaves these tensors out of the merge. An expert without a row has no task vector there. A row
that the base lacks is the mean of the experts that have it, whatever the method. A recipe has other rules: see
`TokenPlan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from mergekit_lab.checkpoints.checkpoint import Checkpoint, Entry, TensorSpec, View
from mergekit_lab.checkpoints.tied_weights import can_be_vocabulary, is_vocabulary_name
from mergekit_lab.checkpoints.tokens import add_tokens, digest_other_tokenizer, read_tokens
from mergekit_lab.checkpoints.vocabulary_rows import Reconciled, RowMap, TokenPlan, Vocabularies
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.ranges import require_choice

CHOICES = ("intersect", "pad", "base")


def count_vocabulary_rows(checkpoint: Checkpoint) -> int | None:
    """The number of rows of a model's embedding. None if no tensor has the name of one."""
    specs = [s for n, s in checkpoint.specs.items() if is_vocabulary_name(n) and s.dtype.is_floating_point]
    return max((spec.shape[0] for spec in specs if len(spec.shape) == 2), default=None)


def list_vocabulary_names(
    base: Checkpoint, experts: Iterable[Checkpoint], *, resized: bool = True
) -> list[str]:
    """Names of the base's tensors with one row per token.

    Args:
        resized: list only those that have another number of rows in some expert.
    """
    every = (base, *experts)
    sizes = [{s.shape[0] for n, s in c.specs.items() if is_vocabulary_name(n) and s.shape} for c in every]
    names = []
    for name, spec in base.specs.items():
        shapes = [c.specs[name].shape for c in every if name in c.specs]
        if not spec.shape or not can_be_vocabulary(name) or len({(len(s), s[1:]) for s in shapes}) > 1:
            continue
        sized = [
            c.specs[name].shape[0] in rows for c, rows in zip(every, sizes, strict=True) if name in c.specs
        ]
        if all(sized) and (len(set(shapes)) > 1 or not resized):
            names.append(name)
    return names


def _read_rows_of_tokens(checkpoint: Checkpoint) -> dict[str, int] | None:
    """The row of each token. Tokens without one are left out: a tokenizer may know more than its model."""
    tokens, rows = read_tokens(checkpoint.folder), count_vocabulary_rows(checkpoint)
    if tokens is None or rows is None:
        return tokens
    return {token: row for token, row in tokens.items() if row < rows}


def reconcile(
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    choice: str | None = None,
    tokenizer: Path | None = None,
    is_merged: Callable[[str], bool] = lambda name: True,
    plan: TokenPlan | None = None,
) -> Reconciled:
    """Give all checkpoints one vocabulary.

    Args:
        base, experts: under the same names (see `align`).
        choice: one of `CHOICES`; None refuses a difference.
        tokenizer: the folder whose tokenizer the result gets (`pad` only); it must know every row that is kept.
        is_merged: whether a tensor of this name is merged. Without a choice, only these need one vocabulary.
        plan: a recipe's rules, for `intersect` and `pad`. With them `pad` makes a tokenizer that knows all
            tokens, if there is none.

    Raises:
        InputError: vocabularies differ and no choice was made; `pad` without one tokenizer that fits; a plan's
            token cannot be had.
    """
    if choice is not None:
        require_choice("embeddings", choice, CHOICES)
    if choice is None and not any(map(is_merged, list_vocabulary_names(base, experts, resized=False))):
        return Reconciled(base, tuple(experts))
    same = _choose_vocabulary(base, experts, choice, tokenizer, is_merged, plan)
    return replace(same, notes=(*same.notes, *_list_unread(base, experts)))


def _choose_vocabulary(
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    choice: str | None,
    tokenizer: Path | None,
    is_merged: Callable[[str], bool],
    plan: TokenPlan | None,
) -> Reconciled:
    changes = plan is not None and bool(plan.tokens or plan.multiple > 1)
    if changes and choice not in ("intersect", "pad"):
        raise InputError(f"embeddings={choice} leaves no room for the recipe's tokens and pad_to_multiple_of")
    names = [n for n in list_vocabulary_names(base, experts) if choice is not None or is_merged(n)]
    tokens = [_read_rows_of_tokens(checkpoint) for checkpoint in (base, *experts)]
    if tokens[0] is None and choice != "base":
        _refuse_contradictions(base, experts, tokens[1:])
    for position, expert in enumerate(experts, 1):
        if tokens[position] is None and count_vocabulary_rows(expert) == count_vocabulary_rows(base):
            tokens[position] = tokens[0]
    base_tokens, known = tokens[0], [own for own in tokens if own is not None]
    differ = base_tokens is not None and any(own != base_tokens for own in known)
    # where every token of the experts has the base's row, rows belong together by number
    alike = base_tokens is not None and all(own.items() <= base_tokens.items() for own in known)
    if changes or (not names and differ and (choice is not None or not alike)):
        names = list_vocabulary_names(base, experts, resized=False)
    if changes and not names:
        raise InputError("the recipe's tokens cannot be placed: the models share no embedding of one width")
    if not names:
        return Reconciled(base, tuple(experts), notes=_list_lacking(experts, tokens))
    models = Vocabularies((base, *experts), names, tokens)
    for model in models.every:
        sizes = {name: model.specs[name].shape[0] for name in names}
        if len(set(sizes.values())) > 1:
            raise InputError(f"{model.label!r} has vocabularies of several sizes ({sizes}): not supported")
    if choice is None:
        raise InputError(_say_choices(models))
    if choice == "base":
        same = base.list_entries({name: name for name in names})
        views = tuple(View(expert, {**expert.list_entries(), **same}) for expert in experts)
        note = f"{join_names(names)}: left out of the merge, the base's own"
        return Reconciled(base, views, tuple(names), notes=(note,), side=partial(_clear_side, base, names))
    if changes and None in tokens:
        unread = [c.label for c, own in zip(models.every, tokens, strict=True) if own is None]
        raise InputError(
            f"the recipe's tokens cannot be placed: the tokenizer of {join_names(unread)} cannot be read: save "
            "it as tokenizer.json with transformers"
        )
    if plan is not None and None not in tokens:
        return _follow(plan, models, tokenizer, choice == "intersect")
    if choice == "intersect":
        return RowMap(models, models.count_rows(0), tokens[0]).reconcile(None)
    return _pad(models, tokenizer)


def _refuse_contradictions(
    base: Checkpoint, experts: Sequence[Checkpoint], tokens: Sequence[dict[str, int] | None]
) -> None:
    """Refuse experts whose tokenizers contradict each other, if the base has no tokenizer that decides."""
    rows: dict[int, str] = {}
    row_of: dict[str, int] = {}
    for expert, own in zip(experts, tokens, strict=True):
        for token, row in (own or {}).items():
            if rows.setdefault(row, token) != token or row_of.setdefault(token, row) != row:
                raise InputError(
                    f"the tokenizer of {expert.label!r} has {token!r} in row {row}, unlike another "
                    f"expert's, and {base.label} has no tokenizer to decide: put the base's tokenizer files "
                    "next to it, or set embeddings=base"
                )


def _clear_side(base: Checkpoint, names: Sequence[str], position: int, side: Checkpoint) -> Checkpoint:
    specs = {n: TensorSpec(base.specs[n].shape, side.specs[n].dtype) for n in names if n in side}
    blank = {n: Entry(s, partial(torch.zeros, s.shape, dtype=s.dtype)) for n, s in specs.items()}
    return View(side, {**side.list_entries(), **blank})


def _say_choices(models: Vocabularies) -> str:
    lines = [f"the vocabularies differ in {join_names(models.names)}:"]
    wanted, tokens = models.count_rows(0), models.tokens[0]
    for position, own in enumerate(models.tokens[1:], 1):
        rows, label = models.count_rows(position), models.every[position].label
        if rows != wanted or (own is not None and own != tokens):
            lines.append(f"  {label!r} has {rows} rows ({wanted} in the base){_say_difference(own, tokens)}")
    matched = "their row, as tokenizer files are missing" if None in models.tokens else "their string"
    lines += [
        f"Tokens would be matched by {matched}. Choose one of:",
        "  embeddings=intersect  the base's vocabulary; a token that an expert lacks gets no change from it, "
        "and tokens that only experts have are dropped",
        "  embeddings=pad        the vocabulary of the tokenizer that knows all tokens (tokenizer_from=… names "
        "it); tokens that the base lacks are the mean of the experts that have them",
        "  embeddings=base       these tensors stay the base's, only the others are merged",
    ]
    return "\n".join(lines)


def _say_difference(own: dict[str, int] | None, base: dict[str, int] | None) -> str:
    if own is None or base is None:
        return ""
    more, less = own.keys() - base.keys(), base.keys() - own.keys()
    moved = {token for token, row in base.items() if own.get(token, row) != row}
    kinds = {"only there": more, "only in the base": less, "in other rows": moved}
    counts = [f"{len(names)} {where} ({join_names(names, 4)})" for where, names in kinds.items() if names]
    return f"; tokens: {', '.join(counts)}" if counts else ""


def _list_lacking(experts: Sequence[Checkpoint], tokens: Sequence[dict[str, int] | None]) -> tuple[str, ...]:
    return tuple(
        f"warning: {expert.label!r} has as many rows{_say_difference(own, tokens[0])}: rows are merged by "
        "number"
        for expert, own in zip(experts, tokens[1:], strict=True)
        if own is not None and tokens[0] is not None and own != tokens[0]
    )


def _list_unread(base: Checkpoint, experts: Sequence[Checkpoint]) -> list[str]:
    """Warnings of tokenizers that differ from the base's, in files from which no list of tokens is read."""
    wanted = digest_other_tokenizer(base.folder)
    return [
        f"warning: the tokenizer of {expert.label!r} is another file than the base's, and its tokens are not "
        "compared (save it as tokenizer.json with transformers): rows are merged by number"
        for expert in experts
        if digest_other_tokenizer(expert.folder) not in (None, wanted)
    ]


def _follow(plan: TokenPlan, models: Vocabularies, tokenizer: Path | None, keep: bool) -> Reconciled:
    """The vocabulary that a recipe describes.

    Args:
        keep: start from the base's tokens.
    """
    base, known = models.every[0], [own or {} for own in models.tokens]
    union = set().union(*known)
    pairs = list(zip(models.every, known, strict=True))
    free = not keep and tokenizer is None
    whole = next((c.folder for c, own in pairs if free and own.keys() >= union), None)
    folder = whole or (base.folder if keep or tokenizer is None else tokenizer)
    assert folder is not None
    if tokenizer not in (None, folder) and plan.tokens:
        raise InputError("tokenizer_from=… beside a recipe whose tokenizer has tokens needs embeddings=pad")
    wanted = _choose_tokens(folder, models)
    merged = [(c.folder, own) for c, own in pairs] if free and whole is None else []
    more, added = add_tokens(folder, merged, plan.tokens) if merged or plan.tokens else ({}, [])
    if more.keys() - wanted.keys():
        wanted = more
    rows = max(max(wanted.values()) + 1, models.count_rows_of(folder))
    padding = -rows % plan.multiple
    table = RowMap(models, rows + padding, wanted, plan, padding)
    same = table.reconcile(None if folder == base.folder else folder)
    nowhere = wanted.keys() - union - plan.tokens.keys()
    notes = [f"warning: no model has a row for {join_names(nowhere)}: it is zero"] if nowhere else []
    if added:
        notes.append(f"the tokenizer gets {len(added)} tokens ({join_names(t['content'] for t in added)})")
    return replace(same, notes=(*same.notes, *notes), added=tuple(added))


def _pad(models: Vocabularies, tokenizer: Path | None) -> Reconciled:
    if None in models.tokens:
        largest = max(range(len(models.every)), key=models.count_rows)
        folder = tokenizer or (models.every[largest].folder if largest else None)
        unread = replace(models, tokens=[None] * len(models.every))
        return RowMap(unread, models.count_rows(largest), None).reconcile(folder)
    known = [own or {} for own in models.tokens]
    union = set().union(*known)
    if tokenizer is not None:
        wanted = _choose_tokens(tokenizer, models)
        nowhere = wanted.keys() - union
        if nowhere:
            raise InputError(
                f"no model has a row for {len(nowhere)} tokens of {tokenizer} ({join_names(nowhere)})"
            )
        rows = max(max(wanted.values()) + 1, models.count_rows_of(tokenizer))
        return RowMap(models, rows, wanted).reconcile(tokenizer)
    for position, own in enumerate(known):
        if own.keys() >= union:
            folder = models.every[position].folder if position else None
            return RowMap(models, models.count_rows(position), own).reconcile(folder)
    raise InputError(
        f"embeddings=pad: no tokenizer here knows all {len(union)} tokens: set tokenizer_from=… to a folder "
        "whose tokenizer does (an expert's name, if the other experts' own tokens may be dropped), "
        "or embeddings=intersect"
    )


def _choose_tokens(tokenizer: Path, models: Vocabularies) -> dict[str, int]:
    """The result's tokens: a model's own are those that have a row there."""
    for checkpoint, own in zip(models.every, models.tokens, strict=True):
        if checkpoint.folder == tokenizer and own is not None:
            return own
    wanted = read_tokens(tokenizer)
    if wanted is None:
        raise InputError(f"tokenizer_from={tokenizer} has no tokenizer.json, vocab.json or vocab.txt")
    return wanted
