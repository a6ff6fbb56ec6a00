"""Make experts' names the base's, where the difference says nothing about their values.

Two differences are harmless: one prefix before every name (`module.`, `model.`), and a tied weight that one
    side
writes under both of its names and the other under one. Everything else is left for the merge to refuse.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import Checkpoint, View
from mergekit_lab.checkpoints.ties import candidates, read_config, ties_embeddings, vocabulary_size
from mergekit_lab.errors import InputError

Say = Callable[[str], None]


def align(
    base: Checkpoint, expert: Checkpoint, *, read: bool = True, say: Say = lambda text: None
) -> Checkpoint:
    """The expert under the base's names.

    Args:
        base, expert: open checkpoints.
        read: compare the values of names that look tied; False takes the configuration's word for it.
        say: receives a sentence for everything that was renamed or left out.

    Raises:
        InputError: a weight that the base ties has two values in the expert.
    """
    expert = _unprefixed(base, expert, say)
    expert = _without_second_names(base, expert, read, say)
    return _with_second_names(base, expert, say)


def _unprefixed(base: Checkpoint, expert: Checkpoint, say: Say) -> Checkpoint:
    if base.specs.keys() == expert.specs.keys() or not expert.specs:
        return expert
    first, last = min(expert.specs), max(expert.specs)
    shared = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    prefix = first[: first[:shared].rfind(".") + 1]
    names = {name.removeprefix(prefix) for name in expert}
    if not prefix or len(names & base.specs.keys()) <= len(expert.specs.keys() & base.specs.keys()):
        return expert
    say(f"{expert.label}: the prefix {prefix!r} of every name is left out")
    specs = {name.removeprefix(prefix): spec for name, spec in expert.specs.items()}
    tied = {n.removeprefix(prefix): k.removeprefix(prefix) for n, k in expert.tied().items()}
    return View(expert, specs, {n: _reader(expert, prefix + n) for n in specs}, tied)


def _reader(checkpoint: Checkpoint, name: str) -> Callable[[], Tensor]:
    return lambda: checkpoint[name]


def _without_second_names(base: Checkpoint, expert: Checkpoint, read: bool, say: Say) -> Checkpoint:
    """Leave out names that the base lacks because it ties them."""
    extra = expert.specs.keys() - base.specs.keys()
    if not extra or ties_embeddings(read_config(base.folder)) is False:
        return expert
    size = vocabulary_size(read_config(expert.folder)) or vocabulary_size(read_config(base.folder))
    second: dict[str, str] = {}
    for group in candidates(expert.specs, size) if size else []:
        shared = [name for name in group if name in base.specs]
        if shared:
            second.update({name: shared[0] for name in group if name in extra})
    for name, kept in second.items():
        if read and not torch.equal(expert[name], expert[kept]):
            raise InputError(
                f"expert {expert.label!r} holds different values for {name} and {kept}, which the base ties: "
                "untie "
                "them in the base, or tie them in the expert"
            )
        say(f"{expert.label}: {name} is {kept}, tied as in the base")
    if not second:
        return expert
    specs = {name: spec for name, spec in expert.specs.items() if name not in second}
    return View(expert, specs, {})


def _with_second_names(base: Checkpoint, expert: Checkpoint, say: Say) -> Checkpoint:
    """Give a tied weight its second name where the base has one."""
    missing = base.specs.keys() - expert.specs.keys()
    if not missing or not ties_embeddings(read_config(expert.folder)):
        return expert
    size = vocabulary_size(read_config(base.folder)) or vocabulary_size(read_config(expert.folder))
    second: dict[str, str] = {}
    for group in candidates(base.specs, size) if size else []:
        shared = [name for name in group if name in expert.specs]
        if shared:
            second.update({name: shared[0] for name in group if name in missing})
    if not second:
        return expert
    for name, kept in second.items():
        say(f"{expert.label}: {name} is taken from {kept}, which the expert ties it to")
    specs = {
        name: expert.specs[second.get(name, name)] for name in base.specs if name in second or name in expert
    }
    specs |= {name: spec for name, spec in expert.specs.items() if name not in specs}
    return View(expert, specs, {n: _reader(expert, k) for n, k in second.items()}, expert.tied() | second)
