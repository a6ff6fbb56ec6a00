"""mergekit recipes: a YAML of arcee-ai/mergekit, run by the methods here.

What is read: `merge_method` (linear, task_arithmetic, ties, dare_linear, dare_ties, slerp, breadcrumbs,
breadcrumbs_ties, della, della_linear, model_stock), `models` or `slices` over the same layers, `base_model`,
`parameters` with filters and gradients on every level, `dtype`, `out_dtype`, `tokenizer_source`,
`chat_template: auto`. All else is refused by name, but for a parameter of other methods: that has no effect, as
in mergekit, and a note says so. mergekit computes in `dtype`, here arithmetic is float32 and `dtype` is what is
stored; its random masks come from torch's generator, here from a counter, so that `dare_*` and `della*` agree
in distribution only.

A gradient is a list that is interpolated over the layers: `t = layer / (layers − 1)` within a slice (1 if there
is one layer); tensors before and after all layers have `t = 0` and the first and the last slice's parameters.
Of conditions the first whose `filter` is in the tensor's name counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from mergekit_lab.checkpoints import Checkpoint
from mergekit_lab.errors import InputError, listing, suggestion
from mergekit_lab.merging.contract import require
from mergekit_lab.stages.checkpoint_inputs import Adapter
from mergekit_lab.stages.recipe_methods import DEFAULTS, PER_MODEL, REQUIRED, PerTensor, method_for

_TOP = {
    *("merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype"),
    *("tokenizer_source", "tokenizer", "chat_template"),
}
_PARAMETERS = {"int8_mask"}.union(*DEFAULTS.values())
_LAYER = re.compile(r"\.(\d+)\.")
_BEFORE_LAYERS = re.compile(r"embed|(^|\.)(wte|wpe|shared)\.")


@dataclass(frozen=True)
class Recipe:
    """A recipe as arguments of `prepare`.

    Attributes:
        base: the base model; for `linear` without one, the first model.
        experts: by the names they have in the recipe.
        settings: where parameters come from.
        dtype: of what is written.
        embeddings, tokenizer_from: what `tokenizer_source` asks for.
        notes: what of it has no effect here.
        text: the YAML as it was.
    """

    base: Any
    experts: Mapping[str, Any]
    settings: Settings
    dtype: str | None
    embeddings: str | None
    tokenizer_from: str | None
    notes: Sequence[str]
    text: str

    def method(self, base: Checkpoint) -> PerTensor:
        """The method for a model with these tensors."""
        entries = {name: spec.numel for name, spec in base.specs.items() if spec.dtype.is_floating_point}
        return self.settings.method(entries)


@dataclass(frozen=True)
class _Slice:
    first: int
    stop: int
    parameters: Mapping[str, Any]
    by_model: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Settings:
    """The parameters of a recipe, resolved tensor by tensor."""

    merge_method: str
    models: Sequence[str]
    slices: Sequence[_Slice]
    parameters: Mapping[str, Any]
    seed: int

    def method(self, entries: Mapping[str, int]) -> PerTensor:
        layers = _layer_counts(entries)
        deepest = max(layers.values(), default=0)
        if self.slices[-1].stop > deepest:
            raise InputError(
                f"the recipe's slices go to layer {self.slices[-1].stop}, and the model has {deepest} layers"
            )
        by_tensor = {}
        for name, count in entries.items():
            shared, by_model = self._resolve(name, layers)
            by_tensor[name] = method_for(self.merge_method, shared, by_model, count, self.seed)
        return PerTensor(merge_method=self.merge_method, seed=self.seed, by_tensor=by_tensor)

    def _resolve(self, name: str, layers: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        part, t = self._place(name, layers)
        wanted = DEFAULTS[self.merge_method]
        shared, by_model = {}, {}
        for key, default in wanted.items():
            levels = [part.parameters, self.parameters]
            if key not in PER_MODEL:
                shared[key] = _first(levels, key, name, t, default)
                continue
            by_model[key] = [
                _first([part.by_model.get(model, {}), *levels], key, name, t, default) for model in self.models
            ]
            lacking = [m for m, v in zip(self.models, by_model[key], strict=True) if v is REQUIRED]
            if lacking:
                raise InputError(f"the recipe gives no {key} to {listing(lacking)} for {name}")
        lost = [key for key, value in shared.items() if value is REQUIRED]
        if lost:
            raise InputError(f"the recipe gives no {lost[0]} for {name}")
        return shared, by_model

    def _place(self, name: str, layers: Mapping[str, int]) -> tuple[_Slice, float]:
        """The slice that a tensor lies in, and `t` there."""
        found = _LAYER.search(name)
        if found is None:
            return self.slices[0 if _BEFORE_LAYERS.search(name) else -1], 0.0
        layer = int(found[1])
        total = layers[name[: found.start()]]
        for part in self.slices:
            stop = total if part.stop < 0 else part.stop
            if part.first <= layer < stop:
                length = stop - part.first
                return part, (layer - part.first) / (length - 1) if length > 1 else 1.0
        raise InputError(f"the recipe's slices leave out layer {layer} ({name}): all layers must be merged")


def _layer_counts(names: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        found = _LAYER.search(name)
        if found:
            stack = name[: found.start()]
            counts[stack] = max(counts.get(stack, 0), int(found[1]) + 1)
    return counts


def _first(levels: Sequence[Mapping[str, Any]], key: str, name: str, t: float, default: Any) -> Any:
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
        t: place between the first layer (0) and the last (1).
        key: the parameter's name, for messages.
    """
    if isinstance(setting, Mapping):
        setting = [setting]
    if isinstance(setting, bool | int | float | str):
        return _number(setting, key)
    if not isinstance(setting, list) or not setting:
        raise InputError(
            f"the recipe's {key} is {setting!r}; it must be a number, a list of numbers, or filters"
        )
    if all(isinstance(value, bool) for value in setting):
        return setting[int(t * (len(setting) - 1))]
    if all(isinstance(value, int | float | str) for value in setting):
        setting = [_number(value, key) for value in setting]
        place = t * (len(setting) - 1)
        low = min(int(place), len(setting) - 1)
        high = min(low + 1, len(setting) - 1)
        return (1 - (place - low)) * setting[low] + (place - low) * setting[high]
    for condition in setting:
        if not isinstance(condition, Mapping) or not {"value"} <= condition.keys() <= {"value", "filter"}:
            raise InputError(f"the recipe's {key} has the condition {condition!r}; it must be filter and value")
        wanted = condition.get("filter")
        if not isinstance(wanted, str | None):
            raise InputError(f"the recipe's {key} has the filter {wanted!r}; it must be a part of tensor names")
        if wanted is None or wanted == "*" or wanted in name:
            return evaluate(condition["value"], name, t, key)
    return None


def _number(value: bool | int | float | str, key: str) -> bool | int | float:
    """A number as it is, or from a text: YAML takes `1e-1` for one."""
    try:
        found = float(value) if isinstance(value, str) else value
    except ValueError:
        found = math.nan
    require(math.isfinite(found), f"the recipe's {key}", value, "a finite number")
    return found


# --- reading --------------------------------------------------------------------------------------------


def read_recipe(file: Path, seed: int = 0) -> Recipe:
    """Read a mergekit YAML.

    Raises:
        InputError: it is none, or asks for something that is not done here, by name.
    """
    try:
        text = file.read_text()
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"recipe={file} cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict) or "merge_method" not in content:
        raise InputError(f"recipe={file} is no mergekit recipe: it has no merge_method")
    return _Reader(content, str(file)).recipe(text, seed)


class _Reader:
    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content = content
        self.where = where
        self.unused: set[str] = set()
        self.merge_method = str(content["merge_method"])
        if self.merge_method not in DEFAULTS:
            self.refuse(f"merge_method {self.merge_method!r}", suggestion(self.merge_method, DEFAULTS))
        self.known(content, _TOP, "the recipe")
        if ("models" in content) == ("slices" in content):
            raise InputError(f"{where}: give either models or slices")

    def refuse(self, what: str, hint: str = "") -> None:
        raise InputError(f"{self.where}: {what} is not supported{hint}")

    def known(self, node: Any, keys: set[str], what: str) -> Mapping[str, Any]:
        if not isinstance(node, Mapping):
            raise InputError(f"{self.where}: {what} is {node!r}; it must have keys")
        for key in node:
            if key not in keys:
                self.refuse(f"the key {key!r} of {what}", suggestion(str(key), keys))
        return node

    def parameters(self, node: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        given = self.known(node.get("parameters") or {}, _PARAMETERS, f"the parameters of {what}")
        self.unused |= given.keys() - DEFAULTS[self.merge_method].keys() - {"int8_mask"}
        return given

    def items(self, node: Mapping[str, Any], key: str) -> list[Any]:
        """The list under a key; nothing there is an empty one."""
        found = node.get(key) or []
        if not isinstance(found, list):
            raise InputError(f"{self.where}: {key} is {found!r}; it must be a list")
        return found

    @cached_property
    def slices(self) -> list[tuple[list[tuple[str, Any, Mapping[str, Any]]], _Slice]]:
        """Of each slice its models (name, source, parameters), and itself."""
        if "models" in self.content:
            sources = [
                self.source(node, {"model", "parameters"}) for node in self.items(self.content, "models")
            ]
            return [(sources, _Slice(0, -1, {}, {name: parameters for name, _, parameters in sources}))]
        keys = {"model", "layer_range", "parameters"}
        found = []
        reached = 0
        for node in self.items(self.content, "slices"):
            self.known(node, {"sources", "parameters", "base_model"}, "a slice")
            sources = [self.source(source, keys) for source in self.items(node, "sources")]
            ranges = {self.layer_range(source) for source in self.items(node, "sources")}
            if len(ranges) != 1:
                self.refuse("a slice whose sources have different layer_range")
            first, stop = next(iter(ranges))
            if first != reached or stop <= first:
                self.refuse(f"a slice of layers {first} to {stop} after layer {reached} (stacking layers)")
            reached = stop
            by_model = {name: parameters for name, _, parameters in sources}
            found.append((sources, _Slice(first, stop, self.parameters(node, "a slice"), by_model)))
        return found

    def layer_range(self, node: Mapping[str, Any]) -> tuple[int, int]:
        given = node.get("layer_range")
        if not isinstance(given, list) or len(given) != 2 or not all(str(n).isdecimal() for n in given):
            raise InputError(f"{self.where}: layer_range is {given!r}; it must be two layers' numbers")
        return int(given[0]), int(given[1])

    def base(self) -> tuple[str | None, Any]:
        """The base's name and source: of the recipe, or of every slice."""
        parts = self.items(self.content, "slices") or [{}]
        given = [part.get("base_model") or self.content.get("base_model") for part in parts]
        if any(node != given[0] for node in given):
            self.refuse("slices with different base_model")
        return self.model(given[0]) if given[0] else (None, None)

    def source(self, node: Any, keys: set[str]) -> tuple[str, Any, Mapping[str, Any]]:
        self.known(node, keys, "a model")
        if "model" not in node:
            raise InputError(f"{self.where}: a model has no model")
        name, source = self.model(node["model"])
        return name, source, self.parameters(node, name)

    def model(self, node: Any) -> tuple[str, Any]:
        """A model's name and source: `path`, `path@revision`, `path+adapter`, or a mapping of these."""
        if isinstance(node, Mapping):
            self.known(node, {"model", "lora"}, "a model reference")
            model, lora = (self.path(node.get(key)) for key in ("model", "lora"))
        else:
            model, _, lora = str(node).partition("+")
        if not model:
            raise InputError(f"{self.where}: the model reference {node!r} has no path")
        return (f"{model}+{lora}", Adapter(model, lora)) if lora else (model, model)

    def path(self, node: Any) -> str:
        if isinstance(node, Mapping):
            self.known(node, {"path", "revision"}, "a model path")
            path = str(node.get("path") or "")
            return f"{path}@{node['revision']}" if path and node.get("revision") else path
        return str(node or "")

    def recipe(self, text: str, seed: int) -> Recipe:
        parameters = self.parameters(self.content, "the recipe")
        sources, _ = next(iter(self.slices), ([], None))
        named = {name: source for name, source, _ in sources}
        if not named:
            raise InputError(f"{self.where}: no models")
        for others, part in self.slices:
            if {name for name, _, _ in others} != named.keys():
                self.refuse(f"other models in the slice from layer {part.first}")
        base_name, base = self.base()
        experts = self.experts(named, base_name, base)
        embeddings, tokenizer = self.tokenizer()
        short = _short(experts)
        every = {**short, **_short([base_name] if base_name else [])}
        for full in sorted(every, key=len, reverse=True):
            text = text.replace(full, every[full])
        settings = Settings(
            self.merge_method, list(experts), [part for _, part in self.slices], parameters, seed
        )
        dtype = self.content.get("out_dtype") or self.content.get("dtype")
        first = next(iter(named.values()))
        return Recipe(
            base=first if base is None else base,
            experts={short[name]: source for name, source in experts.items()},
            settings=settings,
            dtype=None if dtype is None else str(dtype),
            embeddings=embeddings,
            tokenizer_from=tokenizer,
            notes=self.notes(),
            text=text,
        )

    def experts(self, named: Mapping[str, Any], base_name: str | None, base: Any) -> dict[str, Any]:
        """Which of the recipe's models have parameters of their own: all for linear, else all but the base."""
        if self.merge_method == "linear":
            return dict(named) if base_name is None else {**named, base_name: base}
        if base_name is None:
            raise InputError(f"{self.where}: {self.merge_method} needs a base_model")
        others = {name: source for name, source in named.items() if name != base_name}
        if not others:
            raise InputError(f"{self.where}: no models besides the base_model")
        if self.merge_method == "slerp":
            if len(others) != 1:
                raise InputError(
                    f"{self.where}: slerp is between base_model and one other model, not {len(others)}"
                )
            return {base_name: base, **others}
        return others

    def notes(self) -> list[str]:
        unused = [f"the recipe's {name} has no effect on {self.merge_method}" for name in sorted(self.unused)]
        template = self.content.get("chat_template")
        if template not in (None, "auto"):
            self.refuse(f"the chat_template {template!r}")
        return [*unused, *(["the recipe's chat_template is the tokenizer's own"] if template else [])]

    def tokenizer(self) -> tuple[str | None, str | None]:
        wanted = self.content.get("tokenizer_source")
        if self.content.get("tokenizer") is not None:
            if wanted is not None:
                raise InputError(f"{self.where}: give either tokenizer_source or tokenizer")
            wanted = self.known(self.content["tokenizer"], {"source"}, "the tokenizer").get("source", "union")
        if wanted is None:
            return None, None
        if wanted == "base":
            return "intersect", None
        if wanted == "union":
            return "pad", None
        return "pad", self.model(wanted)[0]


def _short(names: Iterable[str]) -> dict[str, str]:
    """The last part of each path, numbered where two have the same."""
    found: dict[str, str] = {}
    for full in names:
        name = "+".join(Path(part).name for part in full.split("+"))
        taken = name in found.values()
        found[full] = f"{name}-{len(found)}" if taken else name
    return found
