"""An adapter's tensors, by what they are for, as peft names them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mergekit_lab.checkpoints.adapter_placement import Wanted
from mergekit_lab.checkpoints.checkpoint import Checkpoint
from mergekit_lab.errors import InputError, join_names

_PREFIX = "base_model.model."
_PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "b_bias",
    "lora_embedding_A": "embedding_a",
    "lora_embedding_B": "embedding_b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
_IN_MEMORY = re.compile(
    r"\.(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.(?!(?:weight|bias)$)([^.]+)(?=\.(?:weight|bias)$|$)"
)
"""A part as a model in memory calls it, with its adapter's name; peft's own saving leaves that out."""


@dataclass
class AdapterContent:
    """An adapter's tensors: names in its file, by what they are for.

    Attributes:
        tensors, config: the adapter's file, and its configuration.
        modules: of factors, by the name of the adapted module and by part.
        plain: of tensors that are saved whole.
        copies: of what a saved module, or an adapted one, is beside the adapter: what weights that are tied to
            it keep.
        nested: modules of which several parameters are adapted: by the module, from the outermost on.
        stacks: names of parameters that are adapted without a module of their own (`target_parameters`).
    """

    tensors: Checkpoint
    config: Mapping[str, Any]
    modules: dict[str, dict[str, str]] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    nested: dict[str, list[str]] = field(default_factory=dict)
    stacks: tuple[str, ...] = ()

    @classmethod
    def read(cls, tensors: Checkpoint, config: Mapping[str, Any]) -> AdapterContent:
        odd = [f"{n}: {s.dtype}" for n, s in tensors.specs.items() if not s.dtype.is_floating_point]
        if odd:
            raise InputError(
                f"the adapter holds tensors that are not floating-point ({join_names(odd)}): if it is "
                "quantized, merge it with peft and give the saved model"
            )
        if not tensors:
            raise InputError("the adapter's file holds no tensors: was it saved where it was trained?")
        content = cls(tensors, config, stacks=tuple(_read_parameters(config)))
        adapters = {match[2] for name in tensors if (match := _IN_MEMORY.search(name))}
        if len(adapters) > 1:
            raise InputError(
                f"its file holds several adapters ({join_names(adapters)}): save one of them, "
                "`model.save_pretrained(folder, selected_adapters=[name])`"
            )
        for name in tensors:
            if not name.startswith(_PREFIX):
                raise InputError(f"the adapter's tensor {name!r} does not start with {_PREFIX!r}")
            content._sort(name)
        for module, parts in content.modules.items():
            if not {*name_pair(parts)} <= parts.keys():
                raise InputError(f"the adapter of {module!r} lacks one of its two factors")
        return content

    def _sort(self, name: str) -> None:
        inner = _IN_MEMORY.sub(r".\1", name.removeprefix(_PREFIX))
        ending = next((end for end in _PARTS if inner.endswith(f".{end}")), None)
        if ending and self.stacks:
            module = inner.removesuffix(f".{ending}")
            outer = re.sub(r"(\.base_layer)+$", "", module)
            if module not in self.nested.setdefault(outer, []):
                self.nested[outer] = sorted([*self.nested[outer], module], key=len)
            self.modules.setdefault(module, {})[_PARTS[ending]] = name
            return
        adapted, unused = ".base_layer." in inner, ".original_module." in inner
        inner = re.sub(r"\.(base_layer|original_module)(?=\.)", "", inner)
        inner = re.sub(r"\.modules_to_save(\.default)?(?=\.)", "", inner)
        if ending:
            self.modules.setdefault(inner.removesuffix(f".{ending}"), {})[_PARTS[ending]] = name
        elif re.search(r"\.(lora_|token_adapter\.)", inner):
            raise InputError(f"the adapter's tensor {name!r} cannot be folded")
        if not ending and (adapted or unused):
            self.copies[inner] = name
        if not ending and not unused:
            if inner in self.plain and not torch.equal(self.tensors[self.plain[inner]], self.tensors[name]):
                raise InputError(f"{self.plain[inner]} and {name} are one tensor with two values")
            self.plain[inner] = name

    def list_wanted(self) -> dict[str, Wanted]:
        """What is looked for in the base: modules by their name, whole tensors by theirs."""
        wanted = {}
        for module, parts in self.modules.items():
            outer = re.sub(r"(\.base_layer)+$", "", module)
            stacks = [f"{outer}.{name}" for name in self.stacks]
            names = (f"{outer}.weight", f"{outer}.in_proj_weight", *stacks)
            wanted[module] = Wanted(names, partial(self.fits, parts))
        for inner, name in {**self.copies, **self.plain}.items():
            wanted[f"={inner}"] = Wanted(
                (inner,),
                lambda shape, n=name: shape[1:] == self.tensors.specs[n].shape[1:],  # type: ignore[misc]
            )
        return wanted

    def fits(self, parts: Mapping[str, str], shape: tuple[int, ...]) -> bool:
        """Whether factors make a change of a tensor of this shape."""
        a, b = (self.tensors.specs[parts[part]].shape for part in name_pair(parts))
        inner = math.prod(a[1:])
        if len(shape) == 3 and len(a) == len(b) == 2 and a[0] % shape[0] == 0 and a[0] == b[1]:
            return sorted((b[0], inner)) == sorted(shape[1:])
        if len(shape) == 2:
            return sorted((b[0], inner)) == sorted(shape)
        return b[0] * inner == math.prod(shape)


def _read_parameters(config: Mapping[str, Any]) -> list[str]:
    """The last parts of the names in `target_parameters`, in the order in which peft nests them."""
    names = config.get("target_parameters") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError("target_parameters is not a list of names")
    return list(dict.fromkeys(name.split(".")[-1] for name in names))


def name_pair(parts: Mapping[str, str]) -> tuple[str, str]:
    """Which parts are the two factors, an embedding's or a layer's."""
    return ("embedding_a", "embedding_b") if "embedding_a" in parts else ("a", "b")
