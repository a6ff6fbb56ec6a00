"""A model put together from layers of other models: stacked, interleaved, repeated or left out.

Tensors before the layers come from the first part, those after them from the last. The configuration says how
many layers there are, and what it lists layer by layer follows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mergekit_lab.checkpoints.checkpoint import Checkpoint, Composed
from mergekit_lab.checkpoints.model_config import read_as_transformers
from mergekit_lab.checkpoints.tied_weights import read_config
from mergekit_lab.errors import InputError, join_names

_LAYER = re.compile(r"\.(\d+)\.")
_BEFORE = re.compile(r"embed(?!_out)|(^|\.)(wte|wpe|shared)\.")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_BY_LAYER = ("layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types", "attention_layers")


class LayerRange(NamedTuple):
    """Layers of a model from `first` to before `stop`."""

    model: Any
    first: int
    stop: int


class LayerName(NamedTuple):
    """A tensor's name in parts: `model.layers`, 3, `mlp.up_proj.weight`."""

    stack: str
    layer: int
    rest: str

    def name_in_layer(self, layer: int) -> str:
        """The name of the same tensor in another layer."""
        return f"{self.stack}.{layer}.{self.rest}"


def split_layer(name: str) -> LayerName | None:
    """The layer that a tensor belongs to; None if it belongs to none."""
    match = _LAYER.search(name)
    return match and LayerName(name[: match.start()], int(match[1]), name[match.end() :])


def count_layers(names: Iterable[str]) -> dict[str, int]:
    """The number of layers in each stack of layers, by its prefix."""
    counts: dict[str, int] = {}
    for parsed in filter(None, map(split_layer, names)):
        counts[parsed.stack] = max(counts.get(parsed.stack, 0), parsed.layer + 1)
    return counts


def stands_before_layers(name: str) -> bool:
    """Whether a tensor that belongs to no layer is used before them, as an embedding is."""
    return bool(_BEFORE.search(name))


def arrange_layers(parts: Sequence[LayerRange], label: str) -> Checkpoint:
    """A model of these layers, in this order.

    Raises:
        InputError: a model has no layers, or several stacks of them; a range that is not in it; layers that do
            not fit each other; a configuration that does not say how many layers there are.
    """
    for part in parts:
        count = _find_stack(part.model)[1]
        if not 0 <= part.first < part.stop <= count:
            raise InputError(
                f"{part.model.label} has {count} layers, but the recipe takes {part.first} to {part.stop}"
            )
    first, last = parts[0].model, parts[-1].model
    known = _list_shapes(first)
    for part in parts[1:]:
        odd = [
            rest
            for rest, shapes in _list_shapes(part.model).items()
            if rest in known and not shapes & known[rest]
        ]
        if odd:
            raise InputError(
                f"{part.model.label}: its layers do not fit those of {first.label}: other shapes "
                f"({join_names(odd)})"
            )
    stack, tied = _find_stack(first)[0], first.find_ties()
    alone = {name: name for name in first if split_layer(name) is None}
    late = {n: n for n in alone if not stands_before_layers(n) and n not in tied and n in last}
    entries = first.list_entries({name: name for name in alone if name not in late})
    number = 0
    for part in parts:
        by_layer: dict[int, list[LayerName]] = {}
        for parsed in filter(None, map(split_layer, part.model)):
            by_layer.setdefault(parsed.layer, []).append(parsed)
        for layer in range(part.first, part.stop):
            own = {
                p._replace(stack=stack).name_in_layer(number): p.name_in_layer(layer) for p in by_layer[layer]
            }
            entries |= part.model.list_entries(own)
            number += 1
    arranged = Composed(first, entries | last.list_entries(late), tied)
    arranged.label = label
    arranged.files = tuple(dict.fromkeys(file for part in parts for file in part.model.files))
    arranged.changed = {**first.changed, **_rewrite(parts, number)}
    return arranged


def _find_stack(model: Checkpoint) -> tuple[str, int]:
    """The prefix of the layers' names, and the number of layers."""
    counts = count_layers(model)
    if len(counts) != 1:
        stacks = f"several stacks of layers ({join_names(counts)})" if counts else "no layers"
        raise InputError(f"{model.label} has {stacks}: slices need a model with one")
    return next(iter(counts.items()))


def _list_shapes(model: Checkpoint) -> dict[str, set[tuple[int, ...]]]:
    """The shapes that a tensor has in all layers, by the end of its name."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, spec in model.specs.items():
        parsed = split_layer(name)
        shapes.setdefault(parsed.rest if parsed else name, set()).add(tuple(spec.shape))
    return shapes


def _rewrite(parts: Sequence[LayerRange], layers: int) -> dict[str, Any]:
    """The keys of the first part's configuration that get other values for these layers."""
    config = _read_layers(parts[0].model)
    count = _find_stack(parts[0].model)[1]
    if not config:
        return {}
    keys = [key for key in _COUNTS if config.get(key) == count]
    if not keys:
        raise InputError(
            f"{parts[0].model.label}: no key of its config.json says that it has {count} layers "
            f"({join_names(_COUNTS)}), so the new number, {layers}, cannot be written"
        )
    changed: dict[str, Any] = dict.fromkeys(keys, layers)
    lists = [_list_by_layer(part.model) for part in parts]
    for key in _BY_LAYER:
        each = [own.get(key, []) for own in lists]
        differ = any(kind != values[0] for values in each for kind in values)
        if (differ or config.get(key)) and all(len(v) >= p.stop for v, p in zip(each, parts, strict=True)):
            changed[key] = [v for values, p in zip(each, parts, strict=True) for v in values[p.first : p.stop]]
    return {key: value for key, value in changed.items() if config.get(key) != value}


def _list_by_layer(model: Checkpoint) -> dict[str, list[Any]]:
    """The type of each layer: as listed, else as transformers derives it, such as every sixth."""
    derived = model.folder and read_as_transformers(model.folder)
    listed = (_read_layers(model), _select_text(derived or {}))
    kinds = {key: next((c[key] for c in listed if c.get(key) is not None), None) for key in _BY_LAYER}
    return {key: values for key, values in kinds.items() if isinstance(values, list)}


def _read_layers(model: Checkpoint) -> dict[str, Any]:
    """The part of a configuration that describes the layers of these tensors."""
    return _select_text({**read_config(model.folder), **model.changed})


def _select_text(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config
