"""What an adapter changes in a base: it adds factors to weights, replaces tensors and breaks ties."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from operator import contains
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.checkpoints.adapter_config import ADAPTER_CONFIG, match_patterns
from mergekit_lab.checkpoints.adapter_content import AdapterContent, name_pair
from mergekit_lab.checkpoints.adapter_layout import Layout, find_transposed
from mergekit_lab.checkpoints.adapter_placement import Placed
from mergekit_lab.checkpoints.checkpoint import Checkpoint
from mergekit_lab.checkpoints.in_memory import find_architecture
from mergekit_lab.checkpoints.tied_weights import is_tying_embeddings, is_vocabulary_name, read_config
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.ranges import require

_LAST_SEEN_TWICE = (0, 21)
_LARGEST_ALPHA = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Factors:
    """The factors of one adapted weight.

    Attributes:
        parts: names of its tensors in the adapter's file, by part.
        rank: of the change; of each matrix of a stack.
        scaling: `α/r` or `α/√r`.
        transposed: whether the base stores the weight as [in, out].
        stack: how many matrices the weight is a stack of; None: it is none.
    """

    parts: Mapping[str, str]
    rank: int
    scaling: float
    transposed: bool = False
    stack: int | None = None


@dataclass
class Change:
    """The change of one tensor of the base."""

    replaced: str | None = None
    factors: Factors | None = None
    bias: Factors | None = None


def check_placed(content: AdapterContent, placed: Placed) -> None:
    """Refuse factors whose weight is not in the base, and an adapter of which nothing is in the base."""
    lost = [f"{module}.weight" for module in content.modules if module not in placed.targets]
    whole = [inner for inner in content.plain if f"={inner}" not in placed.targets]
    if not lost and len(whole) == len(content.plain) and not content.modules:
        lost = whole
    if lost:
        raise InputError(
            f"the adapter changes {len(lost)} tensors the base lacks ({join_names(lost)}): it belongs "
            f"to {content.config.get('base_model_name_or_path') or 'another base'!r}"
        )


def plan_changes(content: AdapterContent, placed: Placed) -> dict[str, Change]:
    """The changes that an adapter makes, by the base's tensor."""
    base, targets, tensors, config = placed.base, placed.targets, content.tensors, content.config
    changes: dict[str, Change] = {}
    layouts: dict[str, Layout] = {}
    for inner, name in content.plain.items():
        target = targets.get(f"={inner}", inner)
        if target in changes:
            raise InputError(f"the adapter saves {target} twice ({changes[target].replaced}, {name})")
        if not _is_repeated(content, targets, inner):
            changes[target] = Change(replaced=name)
    targets = {**targets, **_match_parameters(content, placed)}
    keys = {module: _name_pattern(content, module, targets[module]) for module in content.modules}
    ranks = match_patterns(config, "rank_pattern", "r", keys.values())
    alphas = match_patterns(config, "alpha_pattern", "lora_alpha", keys.values())
    for module, parts in content.modules.items():
        target = targets[module]
        change = changes.setdefault(target, Change())
        if change.factors:
            raise InputError(f"the adapter changes {target} twice")
        stored = base.specs[target if target in base else placed.seconds[target]].shape
        shape = tensors.specs[change.replaced].shape if change.replaced else stored
        stack = shape[0] if len(shape) == 3 and target.split(".")[-1] in content.stacks else None
        key = keys[module]
        change.factors = _read_factors(content, key, parts, ranks[key], alphas[key], stack)
        layout = Layout(_check_shape(target, change.factors, tensors, shape), shape[-2:])
        if (len(shape) == 2 or stack is not None) and "embedding_a" not in parts:
            layouts[target] = layout
        if "b_bias" in parts:
            bias = target.removesuffix("weight") + "bias"
            if bias not in base:
                raise InputError(f"lora_bias of {module!r}, but the base has no {bias}")
            changes.setdefault(bias, Change()).bias = change.factors
    whole = [t for t in changes if t in base and not base.specs[t].dtype.is_floating_point]
    if whole:
        raise InputError(f"the adapter changes integers of the base ({join_names(whole)})")
    swapped, version = bool(config.get("fan_in_fan_out")), str(config.get("peft_version") or "")
    transposed = find_transposed(base, layouts, swapped, version)
    for target, change in changes.items():
        if change.factors and target in transposed:
            change.factors = replace(change.factors, transposed=True)
    return changes


def _name_pattern(content: AdapterContent, module: str, target: str) -> str:
    """The name that rank and alpha patterns are matched with: the module's, or the adapted parameter's."""
    outer, last = re.sub(r"(\.base_layer)+$", "", module), target.split(".")[-1]
    return f"{outer}.{last}" if last in content.stacks else outer


def _match_parameters(content: AdapterContent, placed: Placed) -> dict[str, str]:
    """Which parameter each of a module's nested wrappers adapts. Shapes tell."""
    parameters: dict[str, str] = {}
    for outer, modules in content.nested.items():
        if len(modules) == 1 and placed.targets[modules[0]].endswith(".weight"):
            continue
        parent = placed.targets[modules[0]].rpartition(".")[0]
        names = [name for name in (f"{parent}.{last}" for last in content.stacks) if name in placed.base]
        suiting = [
            {n for n in names if content.fits(content.modules[module], placed.base.specs[n].shape)}
            for module in modules
        ]
        ways = [way for way in permutations(names, len(modules)) if all(map(contains, suiting, way))]
        if len(ways) != 1:
            raise InputError(
                f"nothing tells which of ({join_names(names)}) each of the {len(modules)} adapters of "
                f"{outer!r} changes: merge it with peft and give the saved model"
            )
        parameters.update(zip(modules, ways[0], strict=True))
    return parameters


def untie_parts(content: AdapterContent, placed: Placed, changes: dict[str, Change]) -> dict[str, str]:
    """Second names of tied weights that the adapter unties, each with the first.

    peft adapts a module, not a weight: a head that is tied to an adapted embedding keeps the base's values
    in training, unless both are adapted alike. Changes of names that stay tied become one.
    """
    groups: dict[str, list[str]] = {}
    for second, first in placed.seconds.items():
        groups.setdefault(first, []).append(second)
    known = {target: key.removeprefix("=") for key, target in placed.targets.items() if key.startswith("=")}
    ensured = content.config.get("ensure_weight_tying")
    untied: dict[str, str] = {}
    together: dict[str, Change] = {}
    for first, seconds in groups.items():
        names = [first, *seconds]
        if not any(name in changes for name in names):
            continue
        if ensured and first in changes and not any(n in changes for n in seconds):
            alike = True
        else:
            copies = [content.copies[known[n]] for n in names if known.get(n) in content.copies]
            for name in names if copies else ():
                changes.setdefault(name, Change(replaced=copies[0]))
            alike = all(_are_alike(content.tensors, changes.get(first), changes.get(name)) for name in seconds)
        if alike:
            for name in seconds:
                changes.pop(name, None)
                if name in placed.base:
                    changes[name] = changes[first]
                together[name] = changes[first]
        elif len(seconds) > 1:
            changed = [name for name in names if name in changes]
            raise InputError(
                f"the adapter changes only {join_names(changed)} of {join_names(names)}, which the "
                "base ties and one configuration cannot untie: train it with ensure_weight_tying=True, or save "
                "the merged model untied"
            )
        else:
            untied[seconds[0]] = first
    if untied:
        untied |= {n: k for n, k in placed.seconds.items() if n not in placed.base}
        changes |= {name: change for name, change in together.items() if name in untied}
    elif not groups and is_tying_embeddings({**read_config(placed.base.folder), **placed.base.changed}):
        moved = [name for name in changes if is_vocabulary_name(name)]
        if moved and find_architecture(placed.base) is None:  # a class that is not known here
            raise InputError(
                f"the adapter changes {join_names(moved)}, which the base's configuration ties to an "
                "unknown tensor: untie the base (tie_word_embeddings: false, with both tensors in its "
                "files), or save the merged model"
            )
    return untied


def _are_alike(tensors: Checkpoint, one: Change | None, other: Change | None) -> bool:
    """Whether two changes are equal, or each other's transpose, as those of an embedding and its head are."""
    if one is None or other is None or (one.bias is None) != (other.bias is None):
        return one is other
    if (one.replaced is None) != (other.replaced is None) or (one.factors is None) != (other.factors is None):
        return False
    if one.replaced and other.replaced and not torch.equal(tensors[one.replaced], tensors[other.replaced]):
        return False
    if one.factors is None or other.factors is None:
        return True
    pairs = [_orient_factors(tensors, factors) for factors in (one.factors, other.factors)]
    same = one.factors.scaling == other.factors.scaling
    return same and all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def _orient_factors(tensors: Checkpoint, factors: Factors) -> tuple[Tensor, Tensor]:
    """The factors of a change `[outputs, inputs]`, or of an embedding's `[tokens, width]`."""
    parts = factors.parts
    if "embedding_a" in parts:
        return tensors[parts["embedding_a"]].T, tensors[parts["embedding_b"]].T
    return tensors[parts["b"]], tensors[parts["a"]]


def _is_repeated(content: AdapterContent, targets: Mapping[str, str], inner: str) -> bool:
    """Whether a tensor that the base lacks repeats another one, as a tied weight saved under two names does."""
    if f"={inner}" in targets:
        return False
    tensors, plain = content.tensors, content.plain
    spec = tensors.specs[plain[inner]]
    return any(
        other != inner and tensors.specs[name] == spec and torch.equal(tensors[name], tensors[plain[inner]])
        for other, name in plain.items()
    )


def _read_factors(
    content: AdapterContent, module: str, parts: dict[str, str], configured: Any, alpha: Any, stack: int | None
) -> Factors:
    """The factors of one module with this rank and `α`. `stack` is the parameter's number of matrices."""
    pair, tensors, config = name_pair(parts), content.tensors, content.config
    if bool(config.get("use_dora")) != ("magnitude" in parts):
        problem = "lacks its" if config.get("use_dora") else "is without use_dora and has a"
        raise InputError(f"the DoRA adapter of {module!r} {problem} lora_magnitude_vector")
    if any(len(tensors.specs[parts[part]].shape) < 2 or not tensors.specs[parts[part]].numel for part in pair):
        raise InputError(f"the factors of {module!r} are not two matrices of rank 1 or more")
    rank = tensors.specs[parts[pair[0]]].shape[0] // (stack or 1)
    if configured != rank:
        raise InputError(f"{module!r} has rank {rank} in its file, {configured} in {ADAPTER_CONFIG}")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    require(is_number and abs(alpha) <= _LARGEST_ALPHA, "lora_alpha", alpha, "a number, finite in float32")
    times = _count_uses(parts[pair[0]], config)
    scaling = times * alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Factors(parts, rank, scaling, stack=stack)


def _count_uses(stored: str, config: Mapping[str, Any]) -> int:
    """2 for the output projection of `nn.MultiheadAttention`, to which peft adds the change twice, else 1.

    That is so in its forward pass and when it merges, hence also in training (huggingface/peft#3774).
    """
    if ".base_layer.out_proj." not in stored:
        return 1
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version") or "0.0"))
    if version is None or (int(version[1]), int(version[2])) > _LAST_SEEN_TWICE:
        raise InputError(
            f"{stored!r} was written by peft {config.get('peft_version')}; peft up to 0.21 applied "
            "it twice, and later versions are unknown: merge it with peft and give the saved model"
        )
    return 2


def _check_shape(target: str, factors: Factors, tensors: Checkpoint, shape: tuple[int, ...]) -> tuple[int, int]:
    """The change's numbers of outputs and inputs. Refuse those that do not fit a tensor of this shape."""
    a, b = (tensors.specs[factors.parts[part]].shape for part in name_pair(factors.parts))
    copies = factors.stack or 1
    outputs, inputs = b[0], math.prod(a[1:])
    suits = math.prod(b[1:]) == a[0] == factors.rank * copies and outputs * inputs * copies == math.prod(shape)
    if len(shape) == 2 or factors.stack is not None:
        suits = suits and {outputs, inputs} == set(shape[-2:])
    else:
        suits = suits and (b[0], *a[1:]) == shape
    if not suits:
        raise InputError(
            f"the adapter's factors {list(b)} × {list(a)} do not make a change of {target} "
            f"{list(shape)}: it was trained on another base, or on a grouped convolution, which is not folded"
        )
    return outputs, inputs
