"""YAML from elsewhere, looked at before it is made into values: a few lines can fill the memory."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import yaml

from mergekit_lab.errors import InputError

_MOST_NODES = 200_000
"""Of a file once its aliases are written out. Our largest configuration has some hundred."""
_DEEPEST = 64
"""Levels of a file; our configurations have fewer than ten."""


def read_yaml_text(file: Path) -> str:
    """The text of a YAML file whose values can be made; whether it is YAML is for its reader to say.

    Raises:
        InputError: it is no text in UTF-8, is nested deeper than any configuration, contains itself, or has
            more than 200,000 values once its aliases are written out, as OmegaConf and messages do.
        OSError: it cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 ({error})") from None
    if _measure_depth(text) > _DEEPEST:
        raise InputError(f"{file} is nested too deep to be read")
    if "&" in text and "*" in text and _count_nodes(text) > _MOST_NODES:
        raise InputError(
            f"{file} has more than {_MOST_NODES} values once its aliases (*name) are written out: write fewer"
        )
    return text


def _measure_depth(text: str) -> int:
    """How many lists and mappings of a YAML file lie in each other, up to where it can be read."""
    depth = deepest = 0
    with suppress(yaml.YAMLError):
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            deepest = max(deepest, depth)
            if deepest > _DEEPEST:
                break
    return deepest


def _count_nodes(text: str) -> float:
    """Values of a YAML file with its aliases written out; what cannot be read is Hydra's to say."""
    sizes: dict[int, float] = {}

    def count(node: yaml.Node) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # met again below itself
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            inner = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
            sizes[id(node)] = 1 + sum(map(count, inner))
        return sizes[id(node)]

    try:
        documents = list(yaml.compose_all(text, yaml.SafeLoader))
        return sum(count(node) for node in documents if node is not None)
    except yaml.YAMLError:
        return 0
