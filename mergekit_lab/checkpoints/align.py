"""Give experts the base's names, if the difference says nothing about their values.

Five differences are harmless: a prefix before every name (`model.`, `base_model.model.`) that one side has;
names and stacks as a model of transformers has them in memory, beside those of its files;
what wrappers of modules put into names (`module.`, `_orig_mod.`), and older spellings (`LayerNorm.gamma`);
buffers that a model makes anew whenever it is built, and that some versions write; and a tied weight that one
side writes under both of its names and the other under one. Everything else is left for the merge to refuse.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec, View
from mergekit_lab.checkpoints.in_memory import (
    Architecture,
    as_relaid,
    choose_prefix,
    find_architecture,
    list_mixtures,
)
from mergekit_lab.checkpoints.tied_weights import (
    find_tied_groups,
    is_tying_embeddings,
    read_class_name,
    read_config,
    read_vocabulary_size,
)
from mergekit_lab.errors import InputError, join_names

Say = Callable[[str], None]
_WRAPPERS = re.compile(
    r"^(module\.)+|(^|(?<=\.))((_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+"
)
_SPELLINGS = (
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
    (re.compile(r"\.weight_g$"), ".parametrizations.weight.original0"),
    (re.compile(r"\.weight_v$"), ".parametrizations.weight.original1"),
)
_COUNTING = re.compile(
    r"(^|\.)((position|token_type)_ids|relative_position_index)$|^(input_resolution|context_length|vocab_size)$"
)
"""The last three are of OpenAI's CLIP."""
_FREQUENCIES = re.compile(r"(^|\.)(original_)?inv_freq$")
_CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention)\.(bias|masked_bias)$")


def align(
    base: Checkpoint,
    expert: Checkpoint,
    *,
    read: bool = True,
    say: Say = lambda text: None,
    is_merged: Callable[[str], bool] = lambda name: True,
) -> Checkpoint:
    """The expert under the base's names.

    Args:
        base, expert: open checkpoints.
        read: compare the values of names that look tied; False takes the configuration's word for it.
        say: receives a sentence for everything that was renamed, added or left out.
        is_merged: whether a tensor of the base is; of what is not, values may differ.

    Raises:
        InputError: a weight that the base ties, and that is merged, has two values in the expert.
    """
    expert = _use_base_layout(base, _rename(base, expert, say), expert, say)
    expert = _add_base_buffers(base, expert, say)
    expert = _drop_second_names(base, expert, read, say, is_merged)
    return _add_second_names(base, expert, read, say)


def untie(base: Checkpoint, experts: Iterable[Checkpoint], say: Say = lambda text: None) -> Checkpoint:
    """The base, changed to have two tensors for each weight that it ties and an expert does not. Its
    configuration says so too.
    """
    pairs = {name: kept for expert in experts for name, kept in expert.untied.items()}
    pairs = {name: kept for name, kept in pairs.items() if kept in base}
    if not pairs:
        return base
    say(
        f"{join_names(pairs)}: not tied in the result (tie_word_embeddings: false), because an adapter changes "
        "only one of the tied weights"
    )
    tied = {name: kept for name, kept in base.find_ties().items() if name not in pairs}
    view = View(base, {**base.list_entries(), **base.list_entries(pairs)}, tied)
    view.changed, view.untied = {**base.changed, "tie_word_embeddings": False}, pairs
    return view


def list_computed_buffers(checkpoint: Checkpoint) -> list[str]:
    """Tensors that a model computes from its configuration, whatever a file holds. They are never merged."""
    return [name for name, spec in checkpoint.specs.items() if _is_computed(name, spec)]


def _is_computed(name: str, spec: TensorSpec) -> bool:
    if _COUNTING.search(name):
        return not spec.dtype.is_floating_point
    if _CAUSAL_MASK.search(name):
        return spec.numel == 1 or (len(spec.shape) == 4 and spec.shape[:2] == (1, 1))
    return bool(_FREQUENCIES.search(name))


def _rename(base: Checkpoint, expert: Checkpoint, say: Say) -> Checkpoint:
    if base.specs.keys() == expert.specs.keys() or not expert.specs:
        return expert
    wanted = {_respell(name): name for name in base}
    usuals = {name: _respell(name) for name in expert}
    drop, add = _choose_prefixes(base, expert, usuals, wanted)
    placed = {name: add + usual.removeprefix(drop) for name, usual in usuals.items()}
    new = {
        name: name if name in base and not (drop or add) else wanted.get(at, at) for name, at in placed.items()
    }
    if len(set(new.values())) < len(new) or all(name == at for name, at in new.items()):
        return expert
    if drop:
        others = [name for name, usual in usuals.items() if not usual.startswith(drop)]
        but = f" but {join_names(others)}" if others else ""
        say(f"{expert.label}: the prefix {drop!r} of every name{but} is left out")
    if add:
        say(f"{expert.label}: every name gets the prefix {add!r}, as in the base")
    spelled = [name for name in placed if new[name] != add + name.removeprefix(drop)]
    if spelled:
        say(f"{expert.label}: {len(spelled)} names are spelled as in the base ({join_names(spelled, 2)})")
    return _view_under(expert, new)


def _view_under(checkpoint: Checkpoint, names: Mapping[str, str]) -> View:
    """The checkpoint's tensors that `names` lists, each under its new name."""
    ties = checkpoint.find_ties().items()
    tied = {names[name]: names[kept] for name, kept in ties if name in names and kept in names}
    return View(checkpoint, checkpoint.list_entries({new: name for name, new in names.items()}), tied)


def _respell(name: str) -> str:
    """A tensor's name without what wrappers of modules add to it, in the newer spelling."""
    name = _WRAPPERS.sub("", name)
    for old, new in _SPELLINGS:
        name = old.sub(new, name)
    return name


def _choose_prefixes(
    base: Checkpoint, expert: Checkpoint, usuals: Mapping[str, str], wanted: Mapping[str, str]
) -> tuple[str, str]:
    """The prefix to drop from every name, or to add to it, with which most names are the base's.

    Args:
        usuals: the expert's names, each in its usual spelling.
        wanted: the base's names by their usual spelling.

    Raises:
        InputError: two prefixes meet as many names, of as many shapes, and the expert's class does not tell.
    """

    def count_met(option: tuple[str, str]) -> tuple[int, int]:
        """How many names are met, and how many of these with their shape."""
        pairs = (
            (name, wanted.get(option[1] + usual.removeprefix(option[0]))) for name, usual in usuals.items()
        )
        shapes = [expert.specs[n].shape == base.specs[at].shape for n, at in pairs if at is not None]
        return len(shapes), sum(shapes)

    usual = set(usuals.values())
    if usual <= wanted.keys():
        return "", ""
    heads = Counter(head for name in usual for head, _ in cut_at_dots(name))
    dropped = [(head, "") for head in sorted(heads, key=len) if 2 * heads[head] > len(usual)]
    count = Counter(head for name in wanted for head, rest in cut_at_dots(name) if rest in usual)
    added = [("", head) for head, met_names in sorted(count.items()) if met_names == max(count.values())]
    options = {option: count_met(option) for option in (("", ""), *dropped, *added)}
    best = max(options.values())
    if options["", ""][0] == best[0]:
        return "", ""
    alike = [option for option, score in options.items() if score == best]
    if len(alike) == 1 or 2 * best[0] < len(usuals):
        return alike[0] if 2 * best[0] >= len(usuals) or not alike[0][1] else ("", "")
    class_name = read_class_name(expert.folder)
    prefix = choose_prefix([add for _, add in alike], class_name, find_architecture(base), base)
    if prefix is None:
        names = join_names(add or drop for drop, add in alike)
        raise InputError(
            f"expert {expert.label!r} fits the base under several prefixes ({names}), and nothing "
            "tells which part it is: put the right one before its names, or its config.json next to it"
        )
    return "", prefix


def cut_at_dots(name: str) -> list[tuple[str, str]]:
    """The beginning and the rest of a name, for each dot that it can be cut after."""
    return [(name[: dot.end()], name[dot.end() :]) for dot in re.finditer(r"\.", name)]


def _use_base_layout(base: Checkpoint, renamed: Checkpoint, expert: Checkpoint, say: Say) -> Checkpoint:
    """The expert in the base's layout, if one of both has the layout of files and the other that of a model in
    memory: with the base's names, and a mixture's experts stacked or in pieces as there.
    """
    lacking = len(base.keys() - renamed.keys())
    extra = [name for name in renamed if name not in base and not _is_computed(name, renamed.specs[name])]
    if not lacking or not extra:
        return renamed
    for architecture in _list_architectures(base, expert):
        moved = as_relaid(expert, architecture.match_names(expert), base.specs, architecture.match_names(base))
        if len(base.keys() - moved.keys()) < lacking:
            say(f"{expert.label}: names and layout as in the base, by {architecture.name} of transformers")
            return moved
    return renamed


def _list_architectures(base: Checkpoint, expert: Checkpoint) -> Iterator[Architecture]:
    """Architectures that may know both layouts, the most reliable first."""
    for holder, class_name in ((base, read_class_name(expert.folder)), (base, None), (expert, None)):
        architecture = find_architecture(holder, class_name)
        if architecture is not None:
            yield architecture
    for holder in (base, expert):
        yield from list_mixtures(holder.specs)


def _add_base_buffers(base: Checkpoint, expert: Checkpoint, say: Say) -> Checkpoint:
    buffers = list_computed_buffers(base)
    extra = [name for name in list_computed_buffers(expert) if name not in base]
    if not buffers and not extra:
        return expert
    lacking = [name for name in buffers if name not in expert]
    if extra:
        say(f"{expert.label}: buffers that a model computes are left out, as in the base: {join_names(extra)}")
    if lacking:
        say(f"{expert.label}: buffers that a model computes are taken from the base: {join_names(lacking)}")
    own = expert.list_entries({name: name for name in expert if name not in extra})
    return View(expert, own | base.list_entries({name: name for name in buffers}))


def _drop_second_names(
    base: Checkpoint, expert: Checkpoint, read: bool, say: Say, is_merged: Callable[[str], bool]
) -> Checkpoint:
    """Leave out names that the base lacks because it ties them, or give them the base's."""
    extra = expert.specs.keys() - base.specs.keys()
    if not extra:
        return expert
    own, theirs = read_config(expert.folder), read_config(base.folder)
    rows = read_vocabulary_size(theirs)
    size = read_vocabulary_size(own) or rows
    if size is None:
        return expert
    shapes = {n: (size, *s.shape[1:]) if s.shape[:1] == (rows,) else s.shape for n, s in base.specs.items()}
    shapes |= {name: spec.shape for name, spec in expert.specs.items()}
    alike = {name: TensorSpec(shape, torch.float32) for name, shape in shapes.items()}
    names = {name: name for name in expert}
    for group in find_tied_groups(alike, size, is_tying_embeddings(theirs) is not False):
        first = next((name for name in group if name in base.specs), None)
        held = [name for name in group if name in extra]
        if first is None or not held:
            continue
        if first in expert:
            kept = first
        else:
            kept, *held = held
            names[kept] = first
            say(f"{expert.label}: {kept} is {first}, tied as in the base")
        for name in held:
            if read and is_merged(first) and not _are_equal(expert, name, kept):
                raise InputError(
                    f"expert {expert.label!r} holds different values for {name} and {kept}, which the base "
                    "ties: untie them in the base, or tie them in the expert"
                )
            del names[name]
            say(f"{expert.label}: {name} is {first}, tied as in the base")
    return expert if set(names.values()) == expert.keys() else _view_under(expert, names)


def _are_equal(checkpoint: Checkpoint, *names: str) -> bool:
    one, other = (checkpoint[name] for name in names)
    return one.dtype == other.dtype and torch.equal(one, other)


def _add_second_names(base: Checkpoint, expert: Checkpoint, read: bool, say: Say) -> Checkpoint:
    """Give a tied weight its second name where the base has one."""
    missing = base.specs.keys() - expert.specs.keys()
    if not missing:
        return expert
    own, theirs = read_config(expert.folder), read_config(base.folder)
    size = read_vocabulary_size(theirs) or read_vocabulary_size(own)
    tied = is_tying_embeddings(own)
    if tied is None:
        tied = bool(is_tying_embeddings(theirs)) and (not read or bool(base.find_ties()))
    second = {name: kept for name, kept in base.untied.items() if name in missing and kept in expert.specs}
    for group in find_tied_groups(base.specs, size, tied):
        shared = [name for name in group if name in expert.specs]
        if shared:
            second.update({name: shared[0] for name in group if name in missing})
    if not second:
        return expert
    for name, kept in second.items():
        say(f"{expert.label}: {name} is taken from {kept}, which the expert ties it to")
    own = {name: second.get(name, name) for name in base if name in second or name in expert}
    own |= {name: name for name in expert if name not in own}
    return View(expert, expert.list_entries(own), expert.find_ties() | second)
