"""Quantized checkpoints, whose numbers mean nothing without their scales: told from others and refused."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec
from mergekit_lab.checkpoints.tied_weights import read_config
from mergekit_lab.errors import InputError, listing

_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_PACKED = {*_FLOAT8, torch.int8, torch.uint8, torch.int32}
_PACKED_BESIDE = (".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_SCALES = ("_scale_inv", "_scale", ".scale_inv", ".scale")


def quantised_names(checkpoint: Checkpoint) -> list[str]:
    """Tensors that are numbers only with a scale: float8 beside one, what `quantization_config` packs, and what
    bitsandbytes, GPTQ and AWQ call theirs."""
    specs = checkpoint.specs
    packed = _PACKED if "quantization_config" in read_config(checkpoint.folder) else set()
    return [
        name
        for name, spec in specs.items()
        if (spec.dtype in packed and len(spec.shape) > 1)
        or (spec.dtype in _PACKED and _is_called_packed(name, specs))
        or (spec.dtype in _FLOAT8 and any(name + scale in specs for scale in _SCALES))
    ]


def _is_called_packed(name: str, others: Mapping[str, TensorSpec]) -> bool:
    beside = [*(name + end for end in _PACKED_BESIDE), name.removesuffix("weight") + "SCB"]
    return name.endswith(".qweight") or any(other in others for other in beside)


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that holds quantized tensors.

    Raises:
        InputError: it does, with what to do.
    """
    names = quantised_names(checkpoint)
    if names:
        raise InputError(
            f"{checkpoint.label} is quantized ({len(names)} tensors: {listing(names)}), and quantized numbers "
            "cannot be merged: dequantize it first (load it with transformers, `model.dequantize()`, and save "
            "that), or give the weights that it was made of"
        )
