"""Where an adapter's tensors are in a base.

An adapter has the names that its model had in memory, and the base's files may have others. These places are
tried in turn, until everything is found:

1. The base has the adapter's names.
2. transformers says what the base's tensors are called in memory: in the class that the adapter names, then in
   the base's own class.
3. The adapter is of a part of the base, whose names begin with a prefix there. Several prefixes may fit (the
   towers of a SigLIP, the encoder and the decoder of a Whisper). Then names and shapes decide, then the class.
   If they do not, the adapter is refused.
4. The adapter changes single experts of a mixture, which the base has in stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mergekit_lab.checkpoints.align import cut_at_dots
from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec
from mergekit_lab.checkpoints.in_memory import (
    Architecture,
    Made,
    as_loaded,
    as_relaid,
    choose_prefix,
    find_architecture,
)
from mergekit_lab.checkpoints.tied_weights import can_be_vocabulary, is_tying_embeddings, read_config
from mergekit_lab.errors import InputError, join_names


class Wanted(NamedTuple):
    """What one part of an adapter changes: the names that its tensor may have, and whether it fits a shape."""

    names: tuple[str, ...]
    fits: Callable[[tuple[int, ...]], bool]


class Placed(NamedTuple):
    """Where the wanted tensors are.

    Attributes:
        base: the base in the layout that the adapter was made for: as given, with the stacks that it has in
            memory, or with these stacks in pieces.
        targets: the name in `base` of each wanted tensor that was found.
        seconds: second names of tied weights, which `base` lacks or repeats, each with the first name.
        back: returns `base`, with the adapter folded in, to the layout that was given. None if it is that.
    """

    base: Checkpoint
    targets: dict[str, str]
    seconds: dict[str, str]
    back: Callable[[Checkpoint], Checkpoint] | None = None


def locate(base: Checkpoint, wanted: Mapping[str, Wanted], class_name: str | None) -> Placed:
    """Find the wanted tensors: the first place that has all of them, else the one that has most.

    Args:
        wanted: parts of an adapter, by any key.
        class_name: the class of the adapter's model, if the adapter says.

    Raises:
        InputError: several prefixes fit equally well.
    """
    ties = bool(base.find_ties()) or bool(is_tying_embeddings({**read_config(base.folder), **base.changed}))
    direct = _select_known(wanted, base.specs.__contains__)
    if len(direct) == len(wanted) and not any(map(can_be_vocabulary, direct.values())):
        return Placed(base, direct, {})
    own = find_architecture(base)
    ties = ties or (own is not None and bool(own.tied))  # T5 1.1 ties what is `shared`, whatever the flag says
    seconds = _list_second_names(base, own) if ties else {}

    def list_others() -> Iterator[Placed]:
        for architecture in (find_architecture(base, class_name) if class_name else None, own):
            if architecture is not None:
                yield _place_by_architecture(base, wanted, architecture, ties)
        yield _place_by_prefix(base, wanted, seconds, class_name, own)
        if own is not None and (split := _place_in_pieces(base, own)) is not None:
            yield locate(split.base, wanted, class_name)._replace(back=split.back)

    best = Placed(base, _select_known(wanted, {*base, *seconds}.__contains__), seconds)
    others = list_others()
    while len(best.targets) < len(wanted) and (other := next(others, None)) is not None:
        best = max(best, other, key=lambda placed: len(placed.targets))
    return best


def _place_in_pieces(base: Checkpoint, architecture: Architecture) -> Placed | None:
    """The base with its stacks of experts in pieces, one tensor per expert, as earlier releases of transformers
    write them. None if it has no stacks.
    """
    own, shapes = architecture.match_names(base), architecture.list_pieces()
    split = architecture.match_names(shapes)
    own = {target: made for target, made in own.items() if made.name and target in split}
    split = {target: split[target] for target in own}
    if all(made.name for made in split.values()):
        return None
    specs = {
        n: TensorSpec(shapes[n], own[t].describe(base.specs).dtype)
        for t, made in split.items()
        for n in made.names
    }

    def relay_back(folded: Checkpoint) -> Checkpoint:
        return as_relaid(folded, split, base.specs, own)

    return Placed(as_relaid(base, own, specs, split), {}, {}, relay_back)


def _select_known(wanted: Mapping[str, Wanted], known: Callable[[str], bool]) -> dict[str, str]:
    pairs = ((key, next((n for n in want.names if known(n)), None)) for key, want in wanted.items())
    return {key: name for key, name in pairs if name is not None}


def _list_second_names(base: Checkpoint, architecture: Architecture | None) -> dict[str, str]:
    """Second names of tied weights, whether or not the files have them."""
    seconds = dict(base.find_ties())
    if architecture is not None:
        names = {target: made.name or target for target, made in architecture.match_names(base).items()}
        for second, first in architecture.tied.items():
            first, second = names.get(first, first), names.get(second, second)
            if first in base and second not in seconds and (second not in base or second in base.find_ties()):
                seconds[second] = first
    return seconds


def _place_by_architecture(
    base: Checkpoint, wanted: Mapping[str, Wanted], architecture: Architecture, ties: bool
) -> Placed:
    made = architecture.match_names(base)
    tied = {n: k for n, k in architecture.tied.items() if ties and k in made and n not in made}
    targets = _select_known(wanted, {*made, *tied}.__contains__)
    if all(name in tied or _is_only_moved(name, made[name]) for name in targets.values()):
        names = {target: one.name for target, one in made.items() if one.name}
        placed = {key: names.get(name, name) for key, name in targets.items()}
        return Placed(base, placed, _list_second_names(base, architecture) if ties else {})
    whole = as_loaded(base, architecture)

    def store(folded: Checkpoint) -> Checkpoint:
        return as_relaid(folded, {name: Made(((name,),)) for name in folded}, base.specs, made)

    return Placed(whole, targets, {**whole.find_ties(), **tied}, store)


def _is_only_moved(name: str, made: Made) -> bool:
    """Whether the file's tensor equals the one in memory, and the last part of its name does too."""
    return made.name is not None and made.name.rpartition(".")[2] == name.rpartition(".")[2]


def _place_by_prefix(
    base: Checkpoint,
    wanted: Mapping[str, Wanted],
    seconds: Mapping[str, str],
    class_name: str | None,
    own: Architecture | None,
) -> Placed:
    options = {}
    for drop, add in _list_prefixes(base, wanted.values()):
        names = {k: w._replace(names=tuple(n.removeprefix(drop) for n in w.names)) for k, w in wanted.items()}
        names_by_key = _select_known(names, lambda name, add=add: add + name in base or add + name in seconds)  # type: ignore[misc]
        targets = {key: add + name for key, name in names_by_key.items()}
        fitting = sum(name not in base or wanted[k].fits(base.specs[name].shape) for k, name in targets.items())
        options[drop, add] = (fitting, targets)
    most = max((fitting for fitting, _ in options.values()), default=0)
    best = {prefix: targets for prefix, (fitting, targets) in options.items() if fitting == most}
    if len(best) > 1 and most:
        prefix = choose_prefix([add for _, add in best], class_name, own, base)
        if prefix is None:
            shown = [add or drop for drop, add in best]
            raise InputError(
                f"the adapter's names fit the base under several prefixes ({join_names(shown)}), and "
                "nothing tells which part it was trained on: set "
                '{"auto_mapping": {"base_model_class": "…"}} in its adapter_config.json to the class of the '
                "model that it was trained on, or put the prefix before its names"
            )
        best = {("", prefix): best["", prefix]}
    return Placed(base, next(iter(best.values()), {}), dict(seconds))


def _list_prefixes(base: Checkpoint, wanted: Iterable[Wanted]) -> list[tuple[str, str]]:
    """Pairs of a prefix to drop from names and one to add: all with which some wanted name is the base's."""
    names = {name for want in wanted for name in want.names}
    added = {head for name in base for head, rest in cut_at_dots(name) if rest in names}
    dropped = {head for name in names for head, rest in cut_at_dots(name) if rest in base}
    return [*(("", add) for add in sorted(added)), *((drop, "") for drop in sorted(dropped))]


def read_target_class(config: Mapping[str, Any]) -> str | None:
    """The class of the model that an adapter was trained on, if its configuration says."""
    mapping = config.get("auto_mapping")
    class_name = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    return class_name if isinstance(class_name, str) and class_name.isidentifier() else None
