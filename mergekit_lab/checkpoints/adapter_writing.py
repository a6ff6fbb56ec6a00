"""LoRA adapters as peft saves them: factors by weight, and the configuration that goes with them.

The factors hold the change as it is (`ΔW = B·A`, a scaling of 1), whatever the rank of each weight.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mergekit_lab.checkpoints.adapter_config import ADAPTER_CONFIG
from mergekit_lab.checkpoints.model_files import write_files
from mergekit_lab.checkpoints.shards import write_tensors
from mergekit_lab.checkpoints.tied_weights import read_class_name
from mergekit_lab.errors import InputError

_TASKS = {"ForCausalLM": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
"""peft's task types, by how the names of transformers' classes end. With those of classifiers peft wants the
head as a whole; here it has factors as other weights."""
_SUFFIX = ".weight"


class LowRankChange(NamedTuple):
    """`B·A` of one weight, `B` `[out, r]` and `A` `[r, in]`."""

    b: Tensor
    a: Tensor

    def fill_up(self, rank: int) -> LowRankChange:
        """The same change in factors of a larger rank."""
        more = rank - len(self.a)
        return LowRankChange(pad(self.b, (0, more)), pad(self.a, (0, 0, 0, more)))


def write_adapter(
    folder: Path,
    changes: Mapping[str, LowRankChange],
    *,
    base_name: str = "",
    base_folder: Path | None = None,
    transposed: bool = False,
    one_rank: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Write a folder that `peft.PeftModel.from_pretrained` loads; the files, each with the bytes it must have.

    Args:
        folder: an existing folder.
        changes: by the names of weights of linear layers in memory (`….q_proj.weight`).
        base_name: the base's name on the hub; empty to leave it out.
        base_folder: where its `config.json` is, which says what kind of model it is.
        transposed: whether the base stores these weights as [in, out].
        one_rank: whether all need the same rank: smaller ones are filled up with zeros.
        dtype: the factors' dtype.

    Raises:
        InputError: nothing is changed, or a name that is no weight's.
    """
    if not changes:
        raise InputError("an adapter of no changes: no weight of a linear layer differs from the base's")
    odd = [name for name in changes if not name.endswith(_SUFFIX)]
    if odd:
        raise InputError(f"{odd[0]} is not a weight of a linear layer, and LoRA adapters change only those")
    if one_rank:
        largest = max(len(change.a) for change in changes.values())
        changes = {name: change.fill_up(largest) for name, change in changes.items()}
    ranks = {name.removesuffix(_SUFFIX): change.a.shape[0] for name, change in changes.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {module: own for module, own in ranks.items() if own != rank}
    class_name = read_class_name(base_folder) or ""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": next((task for end, task in _TASKS.items() if class_name.endswith(end)), None),
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": list(ranks),
        "fan_in_fan_out": transposed,
        "bias": "none",
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    tensors = {}
    for module, change in zip(ranks, changes.values(), strict=True):
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = change.a.to(dtype).contiguous()
        tensors[f"{name}.lora_B.weight"] = change.b.to(dtype).contiguous()
    file = folder / "adapter_model.safetensors"
    write_tensors(file, tensors)
    beside = write_files({ADAPTER_CONFIG: json.dumps(config, indent=2) + "\n"}, folder)
    return {file.name: file.stat().st_size} | beside
