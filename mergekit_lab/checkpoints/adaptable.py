"""Which weights of a base peft adapts, and what it calls them.

An adapter has the names that its model has in memory, and changes modules of classes that peft knows. Whatever
else it holds peft leaves out when it loads it, with a warning at most.
"""

from __future__ import annotations

from typing import NamedTuple

from mergekit_lab.checkpoints.checkpoint import Checkpoint
from mergekit_lab.checkpoints.in_memory import Architecture, find_architecture
from mergekit_lab.checkpoints.layers import stands_before_layers
from mergekit_lab.checkpoints.libraries import TRANSFORMERS, find_library
from mergekit_lab.checkpoints.tied_weights import read_config

_NOT_CONVERTED = {"qwen2_moe"}
"""Mixtures of which peft 0.21 loads no adapters under old names."""


class Adaptable(NamedTuple):
    """What an adapter can hold.

    Attributes:
        names: of weights of linear layers in the base, each with its name in an adapter.
        pieces: those of a mixture's experts, which peft joins to stacks: they need one rank.
    """

    names: dict[str, str]
    pieces: frozenset[str] = frozenset()


def find_adaptable(base: Checkpoint) -> Adaptable:
    """As the base's class in transformers says, else matrices that are called a weight and are no embedding."""
    architecture = find_architecture(base) if find_library(base) is TRANSFORMERS else None
    if architecture is not None:
        return _ask_architecture(base, architecture)
    # nn.MultiheadAttention reads the weight of its projection and never calls it
    inside = tuple(name.removesuffix("in_proj_weight") for name in base if name.endswith(".in_proj_weight"))
    matrices = [name for name, spec in base.specs.items() if len(spec.shape) == 2 and name.endswith(".weight")]
    names = [name for name in matrices if not stands_before_layers(name) and not name.startswith(inside)]
    return Adaptable({name: name for name in names})


def _ask_architecture(base: Checkpoint, architecture: Architecture) -> Adaptable:
    """Weights of linear layers, and a mixture's experts one by one under their old names, which peft converts.

    It takes every module that is called like one of their projections for one, so others of these names are not
    among them.
    """
    made = architecture.match_names(base)
    converted = read_config(base.folder).get("model_type") not in _NOT_CONVERTED
    stacks = [one for one in made.values() if converted and one.name is None]
    pieces = [name for one in stacks for name in one.names if name.endswith(".weight")]
    taken = {name.split(".")[-2] for name in pieces}
    names = {
        one.name: target
        for target, one in made.items()
        if one.name and target in architecture.linear and target.split(".")[-2] not in taken
    }
    return Adaptable({**{name: name for name in pieces}, **names}, frozenset(pieces))
