"""mergekit recipes: a YAML of arcee-ai/mergekit, run by the methods here.

docs/mergekit.md says what is read. All else is refused by name, but for a parameter of other methods: that has
no effect, as in mergekit, and a note says so. mergekit computes in `dtype`; here arithmetic is float32, and
`dtype` is what is stored. Its random masks come from torch's generator, here from a counter, so `dare_*` and
`della*` agree in distribution only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mergekit_lab.checkpoints.layers import LayerRange
from mergekit_lab.checkpoints.vocabulary_rows import TokenPlan, TokenSource
from mergekit_lab.commands.prepared import Adapter, Arranged
from mergekit_lab.commands.recipes.methods import (
    BASE_IS_FIRST,
    BASE_IS_ONE_OF_ALL,
    DEFAULTS,
    NUMBERS,
    WITHOUT_BASE,
)
from mergekit_lab.commands.recipes.parameters import LayerSlice, RecipeParameters
from mergekit_lab.commands.recipes.recipe import Recipe
from mergekit_lab.errors import InputError, abbreviate, join_names, suggest
from mergekit_lab.ranges import Count, check_value, require

_TOP = {
    *("merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype"),
    *("tokenizer_source", "tokenizer", "chat_template"),
}
_IDLE = {"name", "random_seed", "write_readme", "normalize", "int8_mask"}
"""Keys of public recipes that mergekit takes and does not read."""
_PARAMETERS = {"int8_mask"}.union(*DEFAULTS.values())


class _Source(NamedTuple):
    """A model of a slice: its layers from `first` to before `stop`, and what is said of it alone."""

    name: str
    model: Any
    first: int
    stop: int
    parameters: Mapping[str, Any]


class _Slice(NamedTuple):
    base: tuple[str, Any] | None
    sources: list[_Source]
    parameters: Mapping[str, Any]


class RecipeReader:
    """One document of a recipe; `made` are the results of others, by name."""

    def __init__(self, content: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        self.made = made
        self.referenced: set[str] = set()
        self.unused: set[str] = set()
        method = content["merge_method"]
        if not isinstance(method, str) or method not in DEFAULTS:
            self.refuse(f"merge_method {abbreviate(method)}", suggest(str(method)[:100], DEFAULTS))
        self.merge_method = method
        self.content = self.check_keys(self._flatten(content), _TOP | _IDLE, "the recipe")
        if ("models" in self.content) == ("slices" in self.content):
            raise InputError("give either models or slices")

    def _flatten(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The recipe with the keys of its only module at the top: so mergekit writes it beside a merge."""
        modules = content.get("modules")
        if modules is None:
            return content
        if not isinstance(modules, Mapping) or modules.keys() != {"default"}:
            self.refuse("modules other than default")
        keys = {"slices", "models", "parameters", "tokenizer_source"}
        module = self.check_keys(modules["default"], keys, "the module default")
        rest = {key: value for key, value in content.items() if key != "modules"}
        if twice := [key for key in module if rest.get(key) is not None]:
            raise InputError(f"{twice[0]} is given twice, in the module default and outside it")
        return {**rest, **module}

    def refuse(self, what: str, hint: str = "") -> None:
        raise InputError(f"{what} is not supported{hint}")

    def check_keys(self, node: Any, keys: set[str], what: str) -> Mapping[str, Any]:
        """A node without its null keys, if it has no others than these."""
        if not isinstance(node, Mapping):
            raise InputError(f"{what} is {abbreviate(node)}; it must have keys")
        settings = {key: value for key, value in node.items() if value is not None}
        for key in settings:
            if key not in keys:
                self.refuse(f"the key {abbreviate(key)} of {what}", suggest(str(key), keys))
        return settings

    def read_parameters(self, node: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        """What a node sets; of parameters that mergekit does not know those that are near to one are slips."""
        parameters = node.get("parameters") or {}
        strange = {*parameters} - _PARAMETERS if isinstance(parameters, Mapping) else set()
        idle = {key for key in strange if not get_close_matches(str(key), _PARAMETERS)}
        parameters = self.check_keys(parameters, _PARAMETERS | idle, f"the parameters of {what}")
        self.unused |= {str(key) for key in parameters} - DEFAULTS[self.merge_method].keys() - {"int8_mask"}
        return parameters

    def read_list(self, node: Mapping[str, Any], key: str) -> list[Any]:
        """The list under a key; nothing there is an empty one."""
        items = node.get(key) or []
        require(isinstance(items, list), f"{key}", items, "a list")
        return items

    @cached_property
    def slices(self) -> list[_Slice]:
        """The recipe's slices; of a list of models one, of all layers."""
        base = self.read_model(self.content["base_model"]) if self.content.get("base_model") else None
        if "models" in self.content:
            keys = {"model", "parameters"}
            sources = [self.read_source(node, keys) for node in self.read_list(self.content, "models")]
            return [_Slice(base, sources, {})]
        keys = {"model", "layer_range", "parameters"}
        slices = []
        for node in self.read_list(self.content, "slices"):
            self.check_keys(node, {"sources", "parameters", "base_model"}, "a slice")
            own = self.read_model(node["base_model"]) if node.get("base_model") else base
            sources = [
                self.read_source(source, keys, self.read_layer_range(source))
                for source in self.read_list(node, "sources")
            ]
            lengths = {source.stop - source.first for source in sources}
            if len(lengths) > 1 or min(lengths, default=1) < 1:
                raise InputError(f"the sources of a slice have {join_names(map(str, lengths))} layers")
            slices.append(_Slice(own, sources, self.read_parameters(node, "a slice")))
        return slices

    def read_layer_range(self, node: Mapping[str, Any]) -> tuple[int, int]:
        layers: Any = node.get("layer_range")
        is_pair = isinstance(layers, list) and len(layers) == 2 and all(str(n).isdecimal() for n in layers)
        require(is_pair, "layer_range", layers, "two layers' numbers")
        return int(layers[0]), int(layers[1])

    def read_source(self, node: Any, keys: set[str], layers: tuple[int, int] = (0, -1)) -> _Source:
        self.check_keys(node, keys, "a model")
        if "model" not in node:
            raise InputError("an entry of models has no `model`")
        name, model = self.read_model(node["model"])
        return _Source(name, model, *layers, self.read_parameters(node, name))

    def read_model(self, node: Any) -> tuple[str, Any]:
        """A model's name and source: `path`, `path@revision`, `path+adapter`, or a mapping of these."""
        if isinstance(node, Mapping):
            self.check_keys(node, {"model", "lora"}, "a model reference")
            model, lora = (self.read_path(node.get(key)) for key in ("model", "lora"))
        else:
            model, plus, lora = self.read_path(node).partition("+")
            if plus and not lora:
                raise InputError(f"the model reference {node!r} has no adapter after its +")
        if not model:
            raise InputError(f"the model reference {abbreviate(node)} has no path")
        if model in self.made:
            self.referenced.add(model)
        source = self.made.get(model, model)
        return (f"{model}+{lora}", Adapter(source, lora)) if lora else (model, source)

    def list_used(self) -> set[str]:
        """The documents whose results this one needs."""
        len(self.slices)
        self.read_tokenizer()
        return self.referenced

    def read_path(self, node: Any) -> str:
        if isinstance(node, Mapping):
            self.check_keys(node, {"path", "revision"}, "a model path")
            path = str(node.get("path") or "")
            return f"{path}@{node['revision']}" if path and node.get("revision") else path
        if isinstance(node, bool) or not isinstance(node, str | int | float | None):
            raise InputError(f"the model reference {abbreviate(node)} is not a path")
        return str(node or "").strip()

    def read_recipe(self, text: str, seed: int) -> Recipe:
        parameters = self.read_parameters(self.content, "the recipe")
        if not any(part.sources for part in self.slices):
            raise InputError("no models")
        rows = [self.split_roles(part) for part in self.slices]
        columns = self.align_columns([experts for _, experts in rows])
        names = [n for part in self.slices for n, *_ in (*part.sources, *([part.base] if part.base else ()))]
        short = _shorten(dict.fromkeys(names))
        experts = _shorten([", ".join(dict.fromkeys(short[s.name] for s in column if s)) for column in columns])
        labels = list(experts.values())
        filled = [[s or base for s, (base, _) in zip(column, rows, strict=True)] for column in columns]
        embeddings, tokenizer = self.read_tokenizer()
        for full in sorted(short, key=len, reverse=True):
            text = text.replace(full, short[full])
        dtype = self.content.get("out_dtype") or self.content.get("dtype")
        return Recipe(
            base=self.join([base for base, _ in rows]),
            experts={label: self.join(column) for label, column in zip(labels, filled, strict=True)},
            settings=RecipeParameters(
                self.merge_method,
                labels,
                self.arrange_layers(labels, columns),
                parameters,
                seed,
                bool(self.based),
            ),
            dtype=None if dtype is None else str(dtype),
            embeddings=embeddings,
            tokenizer_from=tokenizer,
            chat_template=self.read_chat_template(),
            notes=self.list_notes(),
            text=text,
            tokens=self.read_tokens([[base for base, _ in rows], *columns]) if embeddings else None,
        )

    @cached_property
    def based(self) -> bool:
        """Whether there is a base_model: in every slice, or in none."""
        based = {part.base is not None for part in self.slices}
        if len(based) > 1:
            raise InputError("some slices have a base_model, and some have none")
        return based == {True}

    def split_roles(self, part: _Slice) -> tuple[_Source, list[_Source]]:
        """Of a slice what is the base, and what has parameters of its own: all models where the base is one as
        others, else all but the base."""
        names = [source.name for source in part.sources]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            self.refuse(f"{twice[0]} twice in one slice")
        if not part.sources:
            raise InputError("a slice has no sources")
        if not self.based or part.base is None:
            if self.merge_method not in WITHOUT_BASE:
                raise InputError(f"{self.merge_method} needs a base_model")
            return part.sources[0], self.select_counted(part.sources)
        name, model = part.base
        own = next((source for source in part.sources if source.name == name), None)
        others = [source for source in part.sources if source is not own]
        if own is None:
            ranges = {(source.first, source.stop) for source in part.sources}
            if len(ranges) > 1:
                self.refuse("a slice whose sources have different layer_range, without the base_model")
            own = _Source(name, model, *next(iter(ranges)), {})
            if self.merge_method in BASE_IS_ONE_OF_ALL:
                in_models = "models" in self.content and self.merge_method != "passthrough"
                return own, self.select_counted([*others, own] if in_models else others)
        if self.merge_method in BASE_IS_ONE_OF_ALL:
            return own, self.select_counted(part.sources)
        if not others:
            raise InputError("no models besides the base_model")
        if self.merge_method in BASE_IS_FIRST:
            if len(others) != 1:
                raise InputError(f"{self.merge_method} takes base_model and one other model, not {len(others)}")
            return own, [own, *others]
        return own, self.select_counted(others)

    def select_counted(self, experts: list[_Source]) -> list[_Source]:
        wanted = NUMBERS.get(self.merge_method, len(experts))
        if len(experts) != wanted:
            models = "one model" if wanted == 1 else f"{wanted} models"
            raise InputError(f"{self.merge_method} takes {models}, not {len(experts)}")
        return experts

    def align_columns(self, rows: list[list[_Source]]) -> list[list[_Source | None]]:
        """The experts, each with what it is in every slice; None where a slice has fewer."""
        first = {source.name for source in rows[0]}
        if all({source.name for source in row} == first for row in rows):  # whatever their order
            order = [source.name for source in rows[0]]
            rows = [sorted(row, key=lambda source: order.index(source.name)) for row in rows]
        most = max(map(len, rows))
        if min(map(len, rows)) < most and "weight" not in DEFAULTS[self.merge_method]:
            self.refuse(f"slices with different numbers of models for {self.merge_method}")
        return [[row[n] if n < len(row) else None for row in rows] for n in range(most)]

    def join(self, sources: Sequence[_Source]) -> Any:
        if "models" in self.content:
            return sources[0].model
        return Arranged(tuple(LayerRange(source.model, source.first, source.stop) for source in sources))

    def arrange_layers(self, labels: Sequence[str], columns: list[list[_Source | None]]) -> list[LayerSlice]:
        """What the slices say of the result's layers; a model that is not in one has no weight there."""
        slices, first = [], 0
        for number, part in enumerate(self.slices):
            held = {label: column[number] for label, column in zip(labels, columns, strict=True)}
            by_model = {label: s.parameters if s else {"weight": 0.0} for label, s in held.items()}
            if "models" in self.content:
                return [LayerSlice(0, -1, {}, by_model)]
            stop = first + part.sources[0].stop - part.sources[0].first
            starts = {label: s.first for label, s in held.items() if s}
            slices.append(LayerSlice(first, stop, part.parameters, by_model, starts))
            first = stop
        return slices

    def list_notes(self) -> list[str]:
        unused = [f"the recipe's {name} has no effect on {self.merge_method}" for name in sorted(self.unused)]
        unused += [f"the recipe's key {name} has no effect" for name in sorted(_IDLE & self.content.keys())]
        own = self.content.get("chat_template") == "auto"
        return [*unused, *(["the recipe's chat_template is the tokenizer's own"] if own else [])]

    def read_chat_template(self) -> str | None:
        template = self.content.get("chat_template")
        if template in (None, "auto"):
            return None
        if not isinstance(template, str) or "{" not in template:
            raise InputError(
                f"the chat_template {abbreviate(template)} is not supported: give its text in Jinja, or auto"
            )
        return str(template)

    def read_tokenizer(self) -> tuple[str | None, str | None]:
        wanted = self.content.get("tokenizer_source")
        if self.content.get("tokenizer") is not None:
            if wanted is not None:
                raise InputError("give either tokenizer_source or tokenizer")
            wanted = self.tokenizer.get("source", "union")
        if wanted is None:
            return None, None
        if wanted == "base":
            return "intersect", None
        if wanted == "union":
            return "pad", None
        source = self.read_model(wanted)[1]
        return "pad", source if isinstance(source, str) else None

    @property
    def tokenizer(self) -> Mapping[str, Any]:
        node = self.content.get("tokenizer") or {}
        return self.check_keys(node, {"source", "tokens", "pad_to_multiple_of"}, "the tokenizer")

    def read_tokens(self, columns: Sequence[Sequence[_Source | None]]) -> TokenPlan:
        """What is said of single tokens.

        Args:
            columns: what the base and each expert are in every slice.
        """
        multiple = self.tokenizer.get("pad_to_multiple_of") or 1
        check_value(multiple, Count, "pad_to_multiple_of")
        positions: dict[str, int] = {}
        for position, column in enumerate(columns):
            names = {source.name if source else None for source in column}
            if len(names) == 1:
                positions.setdefault(names.pop() or "", position)
        tokens = self.tokenizer.get("tokens") or {}
        named = isinstance(tokens, Mapping) and all(isinstance(t, str) and t for t in tokens)
        require(named, "tokens", tokens, "a mapping with tokens for keys")
        return TokenPlan(
            {token: self.read_token(token, node, positions) for token, node in tokens.items()},
            multiple,
            bool(self.based),
        )

    def read_token(self, token: str, node: Any, positions: Mapping[str, int]) -> TokenSource:
        what = f"the token {abbreviate(token)}"
        settings = self.check_keys(node, {"source", "force"}, what)
        source, forced, name = settings.get("source"), settings.get("force", False), None
        if source is None or type(forced) is not bool:
            raise InputError(f"{what} needs a source, and its force is true or false")
        if isinstance(source, Mapping) and "kind" in source:
            keys = {"zero": {"kind"}, "model_token": {"kind", "model", "token", "token_id"}}
            if source["kind"] not in ("zero", "model_token"):
                self.refuse(
                    f"the kind {abbreviate(source['kind'])} of {what}", suggest(str(source["kind"]), keys)
                )
            source = self.check_keys(source, keys[source["kind"]], f"the source of {what}")
            if source["kind"] == "zero":
                return TokenSource(None, None, forced)
            name = source.get("token", source.get("token_id"))
            if ("token" in source) == ("token_id" in source) or type(name) not in (str, int):
                raise InputError(f"the source of {what} needs either token or token_id")
            source = source.get("model")
        model = self.read_model(source)[0]
        if model not in positions:
            raise InputError(f"{model}, the source of {what}, is none of the models that are merged")
        return TokenSource(positions[model], name, forced)


def _shorten(names: Iterable[str]) -> dict[str, str]:
    """The last part of each path, numbered where two have the same."""
    labels: dict[str, str] = {}
    for full in names:
        name = "+".join(Path(part).name for part in full.split("+"))
        taken = name in labels.values()
        labels[full] = f"{name}-{len(labels)}" if taken else name
    return labels
