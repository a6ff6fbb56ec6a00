"""PEFT LoRA adapters as dense checkpoints: the base's tensors, with the adapter's change added where it has
one.

Hu et al. 2021 (LoRA), Kalajdzievski 2023 (rsLoRA: α/√r), Liu et al. 2024 (DoRA: a learned norm for each
output). What peft writes is read from its files alone; peft's `merge_and_unload` is what the tests compare
with. The change is computed in float32 and the folded tensors are float32 (float64 where the base is), so that
a 16-bit base does not round a small change away.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.checkpoints.adapter_config import ADAPTER_CONFIG, by_pattern, read_adapter_config
from mergekit_lab.checkpoints.adapter_layout import Layout, stored_transposed
from mergekit_lab.checkpoints.checkpoint import Checkpoint, Computed, TensorSpec
from mergekit_lab.checkpoints.files import Pickled, Safetensors
from mergekit_lab.checkpoints.quantized import refuse_quantized
from mergekit_lab.errors import InputError, listing

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
_LAST_SEEN_TWICE = (0, 21)
_LARGEST_ALPHA = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Factors:
    """One adapted module: names of its tensors in the adapter's file, by part, `α/r` or `α/√r`, and whether
    the base stores its weight as [in, out]."""

    parts: Mapping[str, str]
    rank: int
    scaling: float
    transposed: bool = False


@dataclass
class _Change:
    """What becomes of one tensor of the base."""

    replaced: str | None = None
    factors: Factors | None = None
    bias: Factors | None = None


@dataclass(frozen=True)
class AdapterInfo:
    """What a report says of an adapter: targets and their ranks, tensors that are replaced whole."""

    targets: Mapping[str, int]
    replaced: tuple[str, ...]
    dora: bool
    rslora: bool
    base_name: str


class Folded(Computed):
    """A base with a LoRA adapter folded in, tensor by tensor as they are asked for."""

    def __init__(
        self,
        label: str,
        base: Checkpoint,
        tensors: Checkpoint,
        changes: Mapping[str, _Change],
        config: Mapping[str, Any],
    ) -> None:
        changes = {
            **changes,
            **{n: changes[k] for n, k in base.find_ties().items() if k in changes and n not in changes},
        }
        specs = dict(base.specs)
        for name, change in changes.items():
            dtype = torch.promote_types(torch.float32, base.specs[name].dtype)
            shape = tensors.specs[change.replaced].shape if change.replaced else base.specs[name].shape
            specs[name] = TensorSpec(shape, dtype)
        own = tensors.folder is not None and (tensors.folder / "tokenizer.json").is_file()
        folder = tensors.folder if own else base.folder
        super().__init__(label, specs, (*base.files, *tensors.files), folder)
        self.base = base
        self._tensors = tensors
        self._changes = changes
        self._dora = bool(config.get("use_dora"))
        self.info = AdapterInfo(
            targets={n: c.factors.rank for n, c in changes.items() if c.factors},
            replaced=tuple(n for n, c in changes.items() if c.replaced),
            dora=self._dora,
            rslora=bool(config.get("use_rslora")),
            base_name=str(config.get("base_model_name_or_path") or ""),
        )

    def compute(self, name: str) -> Tensor:
        change = self._changes.get(name)
        if change is None:
            return self.base[name]
        dtype = self.specs[name].dtype
        values = (self._tensors[change.replaced] if change.replaced else self.base[name]).to(dtype)
        if change.bias:
            values = values + self._part(change.bias, "b_bias", dtype) * change.bias.scaling
        if change.factors:
            values = self._adapted(name, values, change.factors)
        return values

    def find_ties(self) -> dict[str, str]:
        changes = self._changes
        return {n: k for n, k in self.base.find_ties().items() if changes.get(n) is changes.get(k)}

    def _part(self, factors: Factors, part: str, dtype: torch.dtype) -> Tensor:
        return self._tensors[factors.parts[part]].to(dtype)

    def _adapted(self, name: str, weight: Tensor, factors: Factors) -> Tensor:
        """`W + s·B·A`; DoRA: that, each output's vector scaled to the norm that was learned for it."""
        embedding = "embedding_a" in factors.parts
        a = self._part(factors, "embedding_a" if embedding else "a", weight.dtype)
        b = self._part(factors, "embedding_b" if embedding else "b", weight.dtype)
        delta = b.flatten(1) @ a.flatten(1)
        transposed = embedding or factors.transposed
        delta = (delta.T if transposed else delta).reshape(weight.shape)
        adapted = weight + delta * factors.scaling
        if not self._dora or "magnitude" not in factors.parts:
            return adapted
        outputs = adapted.dim() - 1 if transposed else 0
        others = tuple(d for d in range(adapted.dim()) if d != outputs)
        norm = torch.linalg.vector_norm(adapted, dim=others, keepdim=True)
        return adapted * (self._part(factors, "magnitude", weight.dtype).view_as(norm) / norm)


def open_adapter(folder: Path, base: Checkpoint | None, label: str) -> Folded:
    """A PEFT adapter's folder, folded into `base`.

    Raises:
        InputError: no base, damaged files, tensors that do not fit the base, or anything that this reader
            does not fold, by name.
    """
    config = read_adapter_config(folder, label)
    if base is None:
        raise InputError(
            f"{label}: {folder} is a PEFT adapter, which needs the base it was trained on: give it as an "
            "expert, or "
            "open it with base=…"
        )
    refuse_quantized(base)
    file = folder / "adapter_model.safetensors"
    if file.is_file():
        tensors: Checkpoint = Safetensors(label, file, folder)
    elif (folder / "adapter_model.bin").is_file():
        tensors = Pickled(label, folder / "adapter_model.bin", folder)
    else:
        raise InputError(f"{label}: the adapter folder {folder} lacks adapter_model.safetensors")
    return Folded(label, base, tensors, _changes(label, tensors, base, config), config)


def _changes(
    label: str, tensors: Checkpoint, base: Checkpoint, config: Mapping[str, Any]
) -> dict[str, _Change]:
    modules: dict[str, dict[str, str]] = {}
    plain: dict[str, str] = {}
    for name in tensors:
        if not name.startswith(_PREFIX):
            raise InputError(f"{label}: the adapter's tensor {name!r} does not start with {_PREFIX!r}")
        inner = re.sub(r"\.base_layer(?=\.)", "", name.removeprefix(_PREFIX))
        inner = re.sub(r"\.modules_to_save(\.default)?(?=\.)", "", inner)
        ending = next((end for end in _PARTS if inner.endswith(f".{end}")), None)
        if ending:
            modules.setdefault(inner.removesuffix(f".{ending}"), {})[_PARTS[ending]] = name
        elif re.search(r"\.(lora_|token_adapter\.|original_module\.)", inner):
            raise InputError(f"{label}: the adapter's tensor {name!r} is of a kind that is not folded")
        else:
            plain[inner] = name
    changes: dict[str, _Change] = {}
    layouts: dict[str, Layout] = {}
    lost = []
    _check_kinds(label, tensors)
    place = _Placement(base, [*(f"{m}.weight" for m in modules), *plain])
    for inner, name in plain.items():
        target = place.of(inner)
        if target is None:
            lost.append(inner)
        else:
            changes.setdefault(target, _Change()).replaced = name
    ranks = by_pattern(label, config, "rank_pattern", "r", modules)
    alphas = by_pattern(label, config, "alpha_pattern", "lora_alpha", modules)
    for module, parts in modules.items():
        target = place.of(f"{module}.weight") or place.of(f"{module}.in_proj_weight")
        if target is None:
            lost.append(f"{module}.weight")
            continue
        factors = _factors(label, module, parts, tensors, config, ranks[module], alphas[module])
        change = changes.setdefault(target, _Change())
        change.factors = factors
        shape = tensors.specs[change.replaced].shape if change.replaced else base.specs[target].shape
        layout = Layout(_check_shape(label, target, factors, tensors, shape), shape)
        if len(shape) == 2 and "embedding_a" not in parts:
            layouts[target] = layout
        if "b_bias" in parts:
            bias = target.removesuffix("weight") + "bias"
            if bias not in base:
                raise InputError(f"{label}: lora_bias of {module!r}, but the base has no {bias}")
            changes.setdefault(bias, _Change()).bias = factors
    whole = [target for target in changes if not base.specs[target].dtype.is_floating_point]
    if whole:
        raise InputError(f"{label}: the adapter changes integers of the base ({listing(whole)})")
    transposed = stored_transposed(label, base, layouts, bool(config.get("fan_in_fan_out")))
    for target, change in changes.items():
        if change.factors and target in transposed:
            change.factors = replace(change.factors, transposed=True)
    lost = [inner for inner in lost if not _repeats(tensors, plain, inner)]
    if lost:
        raise InputError(
            f"{label}: the adapter changes {len(lost)} tensors the base lacks ({listing(lost)}): it belongs to "
            f"{config.get('base_model_name_or_path') or 'another base'!r}, or it unties a weight that the base "
            "ties"
        )
    return changes


def _check_kinds(label: str, tensors: Checkpoint) -> None:
    odd = [f"{name}: {spec.dtype}" for name, spec in tensors.specs.items() if not spec.dtype.is_floating_point]
    if odd:
        raise InputError(
            f"{label}: the adapter holds tensors that are no floating-point numbers ({listing(odd)}): if it is "
            "quantized, merge it with peft and give the saved model"
        )


def _repeats(tensors: Checkpoint, plain: Mapping[str, str], inner: str) -> bool:
    """Whether a replaced tensor is the second name of another one, as tied weights are saved."""
    if inner not in plain:
        return False
    spec = tensors.specs[plain[inner]]
    return any(
        other != inner and tensors.specs[name] == spec and torch.equal(tensors[name], tensors[plain[inner]])
        for other, name in plain.items()
    )


class _Placement:
    """Where the adapter's names are in the base: as they are, or with one more or one less prefix."""

    def __init__(self, base: Checkpoint, wanted: list[str]) -> None:
        self._base = base
        heads = {name.split(".")[0] + "." for name in base}
        options = ["", *sorted(heads)]
        self._add = max(options, key=lambda head: sum(head + name in base for name in wanted))
        self._drop = ""
        if not any(self._add + name in base for name in wanted):
            dropped = sorted({name.split(".")[0] + "." for name in wanted})
            self._drop = max(
                dropped, key=lambda head: sum(n.removeprefix(head) in base for n in wanted), default=""
            )

    def of(self, name: str) -> str | None:
        for found in (name, self._add + name, name.removeprefix(self._drop)):
            if found in self._base:
                return found
        return None


def _factors(
    label: str,
    module: str,
    parts: dict[str, str],
    tensors: Checkpoint,
    config: Mapping[str, Any],
    configured: Any,
    alpha: Any,
) -> Factors:
    """Of one module, whose configured rank and `α` these are."""
    pair = ("embedding_a", "embedding_b") if "embedding_a" in parts else ("a", "b")
    missing = [part for part in pair if part not in parts]
    if missing:
        raise InputError(f"{label}: the adapter of {module!r} lacks one of its two factors")
    if bool(config.get("use_dora")) != ("magnitude" in parts):
        problem = "lacks its" if config.get("use_dora") else "is without use_dora and has a"
        raise InputError(f"{label}: the DoRA adapter of {module!r} {problem} lora_magnitude_vector")
    if any(len(tensors.specs[parts[part]].shape) < 2 or not tensors.specs[parts[part]].numel for part in pair):
        raise InputError(f"{label}: the factors of {module!r} are not two matrices of rank 1 or more")
    rank = tensors.specs[parts[pair[0]]].shape[0]
    if configured != rank:
        raise InputError(f"{label}: {module!r} has rank {rank} in its file, {configured} in {ADAPTER_CONFIG}")
    if not isinstance(alpha, int | float) or not abs(alpha) <= _LARGEST_ALPHA:
        raise InputError(f"{label}: lora_alpha is {alpha!r}")
    times = _times_applied(label, parts[pair[0]], config)
    return Factors(parts, rank, times * alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _times_applied(label: str, stored: str, config: Mapping[str, Any]) -> int:
    """2 for the output projection of `nn.MultiheadAttention`, to which peft adds the change twice, else 1.

    That is so in its forward pass and when it merges, hence also in training (huggingface/peft#3774).
    """
    if ".base_layer.out_proj." not in stored:
        return 1
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version") or "0.0"))
    if version is None or (int(version[1]), int(version[2])) > _LAST_SEEN_TWICE:
        raise InputError(
            f"{label}: {stored!r} was written by peft {config.get('peft_version')}; up to 0.21 peft applied it "
            "twice, and of later versions it is not known here: merge it with peft and give the saved model"
        )
    return 2


def _check_shape(
    label: str, target: str, factors: Factors, tensors: Checkpoint, shape: tuple[int, ...]
) -> tuple[int, int]:
    """Outputs and inputs of the change, which must be those of a tensor of this shape."""
    embedding = "embedding_a" in factors.parts
    a = tensors.specs[factors.parts["embedding_a" if embedding else "a"]].shape
    b = tensors.specs[factors.parts["embedding_b" if embedding else "b"]].shape
    fits = math.prod(b[1:]) == factors.rank and b[0] * math.prod(a[1:]) == math.prod(shape)
    if len(shape) == 2:
        fits = fits and {b[0], math.prod(a[1:])} == set(shape)
    else:
        fits = fits and (b[0], *a[1:]) == shape
    if not fits:
        raise InputError(
            f"{label}: the adapter's factors {list(b)} × {list(a)} do not make a change of {target} "
            f"{list(shape)}: "
            "it was trained on another base, or on a grouped convolution, which is not folded"
        )
    return b[0], math.prod(a[1:])
