"""PEFT LoRA adapters as dense checkpoints: the base's tensors with the adapter's change added.

Hu et al. 2021 (LoRA), Kalajdzievski 2023 (rsLoRA: α/√r), Liu et al. 2024 (DoRA: a learned norm for each
output). Only peft's files are read, not peft itself; tests compare with its `merge_and_unload`. The change is
computed in float32 and the folded tensors are float32 (float64 where the base is), so that a 16-bit base does
not round a small change away.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mergekit_lab.checkpoints.adapter_changes import Change, Factors, check_placed, plan_changes, untie_parts
from mergekit_lab.checkpoints.adapter_config import ADAPTER_CONFIG, read_adapter_config
from mergekit_lab.checkpoints.adapter_content import AdapterContent, name_pair
from mergekit_lab.checkpoints.adapter_placement import locate, read_target_class
from mergekit_lab.checkpoints.adapter_writing import LowRankChange
from mergekit_lab.checkpoints.checkpoint import Checkpoint, Computed, TensorSpec, View
from mergekit_lab.checkpoints.files import Pickled, Safetensors
from mergekit_lab.checkpoints.quantized import refuse_quantized
from mergekit_lab.errors import InputError, join_names, name_in_errors

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""What PEFT names the weights of an adapter."""


class Folded(Computed):
    """A base with a LoRA adapter folded in, tensor by tensor as they are asked for.

    Attributes:
        source: the adapter's folder.
        targets: the weights that get a change, with its rank.
        replaced: tensors that are replaced whole.
    """

    def __init__(
        self,
        label: str,
        base: Checkpoint,
        content: AdapterContent,
        changes: Mapping[str, Change],
        untied: Mapping[str, str],
    ) -> None:
        tensors, config = content.tensors, content.config
        specs = dict(base.specs)
        for name in (*changes, *untied):
            change = changes.get(name, Change())
            stored = specs.get(untied.get(name, name)) or tensors.specs[change.replaced or ""]
            dtype = torch.promote_types(torch.float32, stored.dtype)
            specs[name] = TensorSpec(
                tensors.specs[change.replaced].shape if change.replaced else stored.shape, dtype
            )
        own = tensors.folder is not None and (tensors.folder / "tokenizer.json").is_file()
        folder = tensors.folder if own else base.folder
        super().__init__(label, specs, (*base.files, *tensors.files), folder)
        self.base = base
        self.source = tensors.folder
        self.untied = dict(untied)
        self.changed = {**base.changed, "tie_word_embeddings": False} if untied else base.changed
        self._tensors = tensors
        self._changes = changes
        self.targets = {name: change.factors.rank for name, change in changes.items() if change.factors}
        self.replaced = tuple(name for name, change in changes.items() if change.replaced)
        self.dora, self.rslora = bool(config.get("use_dora")), bool(config.get("use_rslora"))
        self.base_name = str(config.get("base_model_name_or_path") or "")

    def compute(self, name: str) -> Tensor:
        change = self._changes.get(name)
        stored = name if name in self.base else self.untied.get(name, name)
        if change is None:
            return self.base[stored].to(self.specs[name].dtype)
        dtype = self.specs[name].dtype
        values = (self._tensors[change.replaced] if change.replaced else self.base[stored]).to(dtype)
        if change.bias:
            values = values + self._read_part(change.bias, "b_bias", dtype) * change.bias.scaling
        if change.factors:
            values = self._adapt(values, change.factors)
        return values

    @property
    def is_plain(self) -> bool:
        """Whether all that the adapter does is to add `B·A` to weights of linear layers."""
        return not self.dora and all(
            change.factors is not None
            and not change.replaced
            and not change.bias
            and change.factors.stack is None
            and {"a", "b"} <= change.factors.parts.keys()
            for change in self._changes.values()
        )

    def read_factors(self, name: str) -> LowRankChange | None:
        """What a plain adapter adds to a weight, `[out, in]`, its scaling in `B`; None: nothing."""
        change = self._changes.get(name)
        if change is None or change.factors is None:
            return None
        a, b = (self._read_part(change.factors, part, torch.float32).flatten(1) for part in ("a", "b"))
        return LowRankChange(b * change.factors.scaling, a)

    def find_ties(self) -> dict[str, str]:
        pairs = {n: k for n, k in self.base.find_ties().items() if n not in self.untied}
        return {n: k for n, k in pairs.items() if self._changes.get(n) is self._changes.get(k)}

    def _read_part(self, factors: Factors, part: str, dtype: torch.dtype) -> Tensor:
        return self._tensors[factors.parts[part]].to(dtype)

    def _adapt(self, weight: Tensor, factors: Factors) -> Tensor:
        """`W + s·B·A`; DoRA: that, each output's vector scaled to the norm that was learned for it."""
        a, b = (self._read_part(factors, part, weight.dtype) for part in name_pair(factors.parts))
        if factors.stack is not None:
            each = "eio" if factors.transposed else "eoi"
            a, b = a.reshape(factors.stack, -1, a.shape[-1]), b.reshape(b.shape[0], -1, factors.stack)
            return weight + torch.einsum(f"ore,eri->{each}", b, a) * factors.scaling
        delta = b.flatten(1) @ a.flatten(1)
        transposed = "embedding_a" in factors.parts or factors.transposed
        delta = (delta.T if transposed else delta).reshape(weight.shape)
        adapted = weight + delta * factors.scaling
        if not self.dora or "magnitude" not in factors.parts:
            return adapted
        outputs = adapted.dim() - 1 if transposed else 0
        others = tuple(d for d in range(adapted.dim()) if d != outputs)
        norm = torch.linalg.vector_norm(adapted, dim=others, keepdim=True)
        return adapted * (self._read_part(factors, "magnitude", weight.dtype).view_as(norm) / norm)


def find_adapter(checkpoint: Checkpoint) -> Folded | None:
    """The folded adapter that a checkpoint is a view of, if it is one of an adapter."""
    while isinstance(checkpoint, View):
        checkpoint = checkpoint.origin
    return checkpoint if isinstance(checkpoint, Folded) else None


def find_adapter_folder(path: Path, label: str) -> Path:
    """The folder of the adapter that a path is meant for: beside the adapter's file, or the only one below, as
    peft saves adapters that have a name; any other path as it is.

    Raises:
        InputError: there are several below.
    """
    if path.name in ADAPTER_FILES and (path.parent / ADAPTER_CONFIG).is_file():
        return path.parent
    held = (ADAPTER_CONFIG, "*.safetensors", "*.bin")
    if not path.is_dir() or any(any(path.glob(pattern)) for pattern in held):
        return path
    named = sorted(file.parent for file in path.glob(f"*/{ADAPTER_CONFIG}"))
    if len(named) > 1:
        names = join_names(folder.name for folder in named)
        raise InputError(f"{label}: {path} holds several adapters ({names}): name one, as {named[0]}")
    return named[0] if named else path


def open_adapter(folder: Path, base: Checkpoint | None, label: str) -> Checkpoint:
    """A PEFT adapter's folder, folded into `base`.

    Raises:
        InputError: no base, damaged files, tensors that do not fit the base, or anything that this reader
            does not fold, by name.
    """
    with name_in_errors(label):
        config = read_adapter_config(folder)
        if base is None:
            raise InputError(
                f"{folder} is a PEFT adapter, which needs the base it was trained on: give it as an expert, or "
                "open it with base=…"
            )
    refuse_quantized(base)
    file, pickled = (folder / name for name in ADAPTER_FILES)
    if not file.is_file() and not pickled.is_file():
        raise InputError(f"{label}: the adapter folder {folder} lacks adapter_model.safetensors")
    tensors = Safetensors(label, [file], folder) if file.is_file() else Pickled(label, [pickled], folder)
    with name_in_errors(label):
        content = AdapterContent.read(tensors, config)
        placed = locate(base, content.list_wanted(), read_target_class(config))
        check_placed(content, placed)
        changes = plan_changes(content, placed)
        folded = Folded(label, placed.base, content, changes, untie_parts(content, placed, changes))
    if placed.back is None:
        return folded
    stored = placed.back(folded)
    others = base.list_entries({name: name for name in base if name not in stored})
    return View(stored, {**stored.list_entries(), **others})
