"""The parameters of a mergekit recipe, for each tensor of a model.

A gradient is a list that is interpolated over the layers: `t = layer / (layers − 1)` within a slice (1 if there
is one layer); tensors before and after all layers have `t = 0` and the first and the last slice's parameters.
Of conditions the first whose `filter` is in the tensor's name counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mergekit_lab.checkpoints import count_layers, split_layer, stands_before_layers
from mergekit_lab.commands.recipes.methods import (
    DEFAULTS,
    REQUIRED,
    PerTensor,
    check_parameter,
    is_per_model,
    make_method,
)
from mergekit_lab.errors import InputError, abbreviate, join_names
from mergekit_lab.ranges import FLOAT32_MAX, require


@dataclass(frozen=True)
class LayerSlice:
    """Layers of the result from `first` to before `stop` (−1: to the last), and their own parameters.

    Attributes:
        parameters: for all models.
        by_model: for one; filters are compared with the names that a tensor has in it.
        starts: the layer of a model that is the first here; `first` where it is not said.
    """

    first: int
    stop: int
    parameters: Mapping[str, Any]
    by_model: Mapping[str, Mapping[str, Any]]
    starts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeParameters:
    """The parameters of a recipe, resolved tensor by tensor."""

    merge_method: str
    models: Sequence[str]
    slices: Sequence[LayerSlice]
    parameters: Mapping[str, Any]
    seed: int
    based: bool = True

    def make_method(self, entries: Mapping[str, int]) -> PerTensor:
        layers = count_layers(entries)
        by_tensor = {}
        for name, count in entries.items():
            shared, by_model = self._resolve(name, layers)
            by_tensor[name] = make_method(self.merge_method, shared, by_model, count, self.seed, self.based)
        return PerTensor(merge_method=self.merge_method, seed=self.seed, by_tensor=by_tensor)

    def _resolve(self, name: str, layers: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        part, t = self._locate(name, layers)
        shared, by_model = {}, {}
        for key, default in DEFAULTS[self.merge_method].items():
            own = is_per_model(self.merge_method, key)
            models = self.models if own else [""]
            values = []
            for model in models:
                levels = [part.by_model.get(model, {}), part.parameters, self.parameters]
                values.append(_find_first(levels, key, _name_in(part, model, name), t, default))
            lacking = [model for model, value in zip(models, values, strict=True) if value is REQUIRED]
            if lacking:
                to = f" to {join_names(lacking)}" if own else ""
                raise InputError(f"the recipe gives no {key}{to} for {name}")
            for value in values:
                check_parameter(self.merge_method, key, value, name)
            if own:
                by_model[key] = values
            else:
                (shared[key],) = values
        return shared, by_model

    def _locate(self, name: str, layers: Mapping[str, int]) -> tuple[LayerSlice, float]:
        """The slice that a tensor lies in, and `t` there."""
        parsed = split_layer(name)
        if parsed is None:
            return self.slices[0 if stands_before_layers(name) else -1], 0.0
        part = next(part for part in self.slices if parsed.layer < part.stop or part.stop < 0)
        length = (layers[parsed.stack] if part.stop < 0 else part.stop) - part.first
        return part, (parsed.layer - part.first) / (length - 1) if length > 1 else 1.0


def _name_in(part: LayerSlice, model: str, name: str) -> str:
    """What a model calls the tensor `name` of the result."""
    parsed = split_layer(name)
    if parsed is None or model not in part.starts:
        return name
    return parsed.name_in_layer(parsed.layer - part.first + part.starts[model])


def _find_first(levels: Sequence[Mapping[str, Any]], key: str, name: str, t: float, default: Any) -> Any:
    for level in levels:
        if key in level:
            value = evaluate(level[key], name, t, key)
            if value is not None:
                return value
    return default


def evaluate(setting: Any, name: str, t: float, key: str) -> Any:
    """A parameter's value for one tensor: a number, a gradient, or the first condition that holds.

    Args:
        setting: as it stands in the recipe.
        name: the tensor's.
        t: where it lies between the first layer (0) and the last (1).
        key: the parameter's name, for messages.
    """
    if isinstance(setting, Mapping):
        setting = [setting]
    if isinstance(setting, bool | int | float | str):
        return _read_number(setting, key)
    rule = "a number, a list of numbers, or filters"
    require(isinstance(setting, list) and bool(setting), f"the recipe's {key}", setting, rule)
    if all(isinstance(value, bool) for value in setting):
        return setting[int(t * (len(setting) - 1))]
    if all(isinstance(value, int | float | str) and not isinstance(value, bool) for value in setting):
        setting = [_read_number(value, key) for value in setting]
        position = t * (len(setting) - 1)
        low = min(int(position), len(setting) - 1)
        high = min(low + 1, len(setting) - 1)
        return (1 - (position - low)) * setting[low] + (position - low) * setting[high]
    for condition in setting:
        if not isinstance(condition, Mapping) or not {"value"} <= condition.keys() <= {"value", "filter"}:
            raise InputError(
                f"the recipe's {key} has the condition {abbreviate(condition)}; it must be filter and value"
            )
        wanted = condition.get("filter")
        if not isinstance(wanted, str | None):
            raise InputError(
                f"the recipe's {key} has the filter {abbreviate(wanted)}; it must be a part of tensor names"
            )
        if wanted is None or wanted == "*" or wanted in name:
            return evaluate(condition["value"], name, t, key)
    return None


def _read_number(value: bool | int | float | str, key: str) -> bool | int | float:
    """A number as it is, or from a text: YAML takes `1e-1` for one."""
    try:
        number = value if isinstance(value, bool) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    require(abs(number) <= FLOAT32_MAX, f"the recipe's {key}", value, "a finite number, in float32 too")
    return number
