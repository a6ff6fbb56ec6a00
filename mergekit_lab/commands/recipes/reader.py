"""mergekit recipes: a YAML of arcee-ai/mergekit, run by the methods here.

What is read: `merge_method` (linear, task_arithmetic, ties, dare_linear, dare_ties, slerp, breadcrumbs,
breadcrumbs_ties, della, della_linear, model_stock), `models` or `slices` over the same layers, `base_model`,
`parameters` with filters and gradients on every level, `dtype`, `out_dtype`, `tokenizer_source`,
`chat_template: auto`. All else is refused by name, but for a parameter of other methods: that has no effect, as
in mergekit, and a note says so. mergekit computes in `dtype`, here arithmetic is float32 and `dtype` is what is
stored; its random masks come from torch's generator, here from a counter, so that `dare_*` and `della*` agree
in distribution only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from mergekit_lab.checkpoints import Checkpoint
from mergekit_lab.commands.prepare import Adapter
from mergekit_lab.commands.recipes.methods import DEFAULTS, PerTensor
from mergekit_lab.commands.recipes.parameters import LayerSlice, RecipeParameters
from mergekit_lab.errors import InputError, abbreviate, suggestion
from mergekit_lab.yaml_files import read_yaml_text

_TOP = {
    *("merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype"),
    *("tokenizer_source", "tokenizer", "chat_template"),
}
_IDLE = {"name", "random_seed", "write_readme", "normalize", "int8_mask"}
"""Keys of public recipes that mergekit takes and does not read."""
_PARAMETERS = {"int8_mask"}.union(*DEFAULTS.values())


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
    settings: RecipeParameters
    dtype: str | None
    embeddings: str | None
    tokenizer_from: str | None
    notes: Sequence[str]
    text: str

    def method(self, base: Checkpoint) -> PerTensor:
        """The method for a model with these tensors."""
        entries = {name: spec.numel for name, spec in base.specs.items() if spec.dtype.is_floating_point}
        return self.settings.method(entries)


def read_recipe(file: Path, seed: int = 0) -> Recipe:
    """Read a mergekit YAML.

    Raises:
        InputError: it is none, or asks for something that is not done here, by name.
    """
    try:
        text = read_yaml_text(file)
        content = yaml.safe_load(text)
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"recipe={file} cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict) or "merge_method" not in content:
        raise InputError(f"recipe={file} is no mergekit recipe: it has no merge_method")
    return _Reader(content, str(file)).recipe(text, seed)


class _Reader:
    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.unused: set[str] = set()
        method = content["merge_method"]
        if not isinstance(method, str) or method not in DEFAULTS:
            self.refuse(f"merge_method {abbreviate(method)}", suggestion(str(method)[:100], DEFAULTS))
        self.merge_method = method
        self.content = self.known(self.flat(content), _TOP | _IDLE, "the recipe")
        if ("models" in self.content) == ("slices" in self.content):
            raise InputError(f"{where}: give either models or slices")

    def flat(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The recipe with the keys of its only module at the top: so mergekit writes it beside a merge."""
        modules = content.get("modules")
        if modules is None:
            return content
        if not isinstance(modules, Mapping) or modules.keys() != {"default"}:
            self.refuse("modules other than default")
        keys = {"slices", "models", "parameters", "tokenizer_source"}
        module = self.known(modules["default"], keys, "the module default")
        rest = {key: value for key, value in content.items() if key != "modules"}
        if twice := [key for key in module if rest.get(key) is not None]:
            raise InputError(f"{self.where}: {twice[0]} stands in the module default and beside it")
        return {**rest, **module}

    def refuse(self, what: str, hint: str = "") -> None:
        raise InputError(f"{self.where}: {what} is not supported{hint}")

    def known(self, node: Any, keys: set[str], what: str) -> Mapping[str, Any]:
        """A node without its null keys, if it has no others than these."""
        if not isinstance(node, Mapping):
            raise InputError(f"{self.where}: {what} is {abbreviate(node)}; it must have keys")
        given = {key: value for key, value in node.items() if value is not None}
        for key in given:
            if key not in keys:
                self.refuse(f"the key {abbreviate(key)} of {what}", suggestion(str(key), keys))
        return given

    def parameters(self, node: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        """What a node sets; of parameters that mergekit does not know those that are near to one are slips."""
        given = node.get("parameters") or {}
        strange = {*given} - _PARAMETERS if isinstance(given, Mapping) else set()
        idle = {key for key in strange if not get_close_matches(str(key), _PARAMETERS)}
        given = self.known(given, _PARAMETERS | idle, f"the parameters of {what}")
        self.unused |= {str(key) for key in given} - DEFAULTS[self.merge_method].keys() - {"int8_mask"}
        return given

    def items(self, node: Mapping[str, Any], key: str) -> list[Any]:
        """The list under a key; nothing there is an empty one."""
        found = node.get(key) or []
        if not isinstance(found, list):
            raise InputError(f"{self.where}: {key} is {abbreviate(found)}; it must be a list")
        return found

    @cached_property
    def slices(self) -> list[tuple[list[tuple[str, Any, Mapping[str, Any]]], LayerSlice]]:
        """Of each slice its models (name, source, parameters), and itself."""
        if "models" in self.content:
            sources = [
                self.source(node, {"model", "parameters"}) for node in self.items(self.content, "models")
            ]
            return [(sources, LayerSlice(0, -1, {}, {name: parameters for name, _, parameters in sources}))]
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
            found.append((sources, LayerSlice(first, stop, self.parameters(node, "a slice"), by_model)))
        return found

    def layer_range(self, node: Mapping[str, Any]) -> tuple[int, int]:
        given = node.get("layer_range")
        if not isinstance(given, list) or len(given) != 2 or not all(str(n).isdecimal() for n in given):
            raise InputError(
                f"{self.where}: layer_range is {abbreviate(given)}; it must be two layers' numbers"
            )
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
            model, plus, lora = self.path(node).partition("+")
            if plus and not lora:
                raise InputError(f"{self.where}: the model reference {node!r} has no adapter after its +")
        if not model:
            raise InputError(f"{self.where}: the model reference {abbreviate(node)} has no path")
        return (f"{model}+{lora}", Adapter(model, lora)) if lora else (model, model)

    def path(self, node: Any) -> str:
        if isinstance(node, Mapping):
            self.known(node, {"path", "revision"}, "a model path")
            path = str(node.get("path") or "")
            return f"{path}@{node['revision']}" if path and node.get("revision") else path
        if isinstance(node, bool) or not isinstance(node, str | int | float | None):
            raise InputError(f"{self.where}: the model reference {abbreviate(node)} is no path")
        return str(node or "").strip()

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
        settings = RecipeParameters(
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
        unused += [f"the recipe's key {name} has no effect" for name in sorted(_IDLE & self.content.keys())]
        template = self.content.get("chat_template")
        if template not in (None, "auto"):
            self.refuse(f"the chat_template {abbreviate(template)}")
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
