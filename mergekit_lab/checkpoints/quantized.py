"""Recognize and refuse quantized checkpoints, whose numbers mean nothing without their scales.

Libraries differ in what they call such tensors, and new names come every year. They store them alike: a
weight in few bits (float8, or integers), and in the same module something smaller that scales it. Some leave a
marker beside it, and the scale in the marker or nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec
from mergekit_lab.checkpoints.tied_weights import read_config
from mergekit_lab.errors import InputError, join_names

_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
_INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32}
_WIDE = {torch.int64, torch.uint64, torch.bool}
"""Integers that are quantized where they are called a weight; other ones are indices and masks."""
_CONFIGS = ("quantization_config", "compression_config")
_NO_WEIGHT = re.compile(r"bias|scale|zero|(^|_)(index|ids?|g_idx|masks?|shape|invperm)$")
"""Integers of ordinary modules, and what belongs to a packed weight that is named itself."""
_NO_SCALE = re.compile(
    r"bias|^(?!.*scale|weight_).*(^|_)(b|beta|gamma|mean|var|masks?)$|^weight$|^(embed|head|logit)_scale$"
)
"""What ordinary modules have beside a weight."""
_MARKER = re.compile(
    r"(^|\.)(comfy_quant|scaled_fp8|_extra_state|weight_(format|quantizer)|quant_(state|map|type))(\.|$)"
)
"""Markers of quantized numbers around: of ComfyUI, Transformer Engine, ModelOpt and bitsandbytes."""
_SCALE = re.compile(r"scale|absmax|amax", re.IGNORECASE)
_OF_WEIGHT = re.compile(r"weight_?scale|scale_?weight")
_SCALE_WORD = re.compile(r"(inv|de|de?quant)?scales?|inv|abs|a?max|absmax|weights?|w", re.IGNORECASE)
_INNER = re.compile(r"(\._\w+)+$")
"""Below its name, what a weight of a tensor subclass is made of: `weight._data`."""


def find_quantized(checkpoint: Checkpoint) -> list[str]:
    """Tensors that are numbers only with a scale."""
    specs, config = checkpoint.specs, read_config(checkpoint.folder)
    configured = any(config.get(key) for key in _CONFIGS)
    modules: dict[str, list[str]] = {}
    for name in specs:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    packed = [
        name
        for name, spec in specs.items()
        if spec.dtype in _FLOAT8 | _INTEGERS | _WIDE
        and spec.shape
        and spec.numel > 1
        and not _NO_WEIGHT.search(name.rpartition(".")[2])
    ]
    marked = tuple({name[: match.start(2)] for name in specs if packed and (match := _MARKER.search(name))})
    scales: dict[tuple[str, ...], list[str]] = {}
    for name in specs if packed else ():
        if _SCALE.search(name):
            for words in _list_spellings(name):
                scales.setdefault(words, []).append(name)

    def is_quantized(name: str) -> bool:
        spec, wide = specs[name], len(specs[name].shape) > 1
        called_weight = "weight" in name.rpartition(".")[2]
        if called_weight and spec.dtype not in _FLOAT8:  # also of one axis, as SpQR packs them
            return True
        if spec.dtype in _WIDE:
            return False
        if (configured and wide) or (spec.dtype in _FLOAT8 and name.startswith(marked)):
            return not _MARKER.search(name)
        near = _list_neighbors(name, specs, modules) if wide or spec.dtype in _FLOAT8 else ()
        return any(_can_scale(n, specs[n], spec) for n in (*near, *_find_scales(name, specs, scales)))

    return [name for name in packed if is_quantized(name)]


def _split_words(name: str) -> tuple[str, ...]:
    """What a weight's name and its scale's have in common, wherever that stands: `a.q.weight`, `scales.a.q`."""
    return tuple(word for word in re.split(r"[._]", name) if word and not _SCALE_WORD.fullmatch(word))


def _list_spellings(name: str) -> list[tuple[str, ...]]:
    """Its words, and those without the first: `model.a.q.weight` and `quantization.a.q.scale` are one's."""
    words = _split_words(name)
    return [words, words[1:]] if len(words) > 2 else [words]


def _find_scales(
    name: str, specs: Mapping[str, TensorSpec], scales: Mapping[tuple[str, ...], Sequence[str]]
) -> Iterator[str]:
    """What is called as a weight's scales are, or those of all weights of a module around it, or of the file.

    There a single word for several numbers (`attn.scale`) is a parameter of its own.
    """
    words = _split_words(name)
    for key in _list_spellings(name):
        yield from scales.get(key, ())
    for cut in range(len(words)):
        for other in scales.get(words[:cut], ()):
            leaf = other.rpartition(".")[2]
            of_all = specs[other].numel == 1 or len(leaf.split("_")) > 1 or leaf.endswith("scales")
            if of_all and _split_words(other) == words[:cut]:
                yield other


def _list_neighbors(name: str, specs: Mapping[str, TensorSpec], modules: Mapping[str, list[str]]) -> list[str]:
    """What is beside a weight in its module, as far as it can be this weight's, and what is below it."""
    owner = _INNER.sub("", name)
    module, _, leaf = owner.rpartition(".")
    siblings = modules.get(module, [])
    weights = [n for n in siblings if len(specs[n].shape) > 1 and not _NO_WEIGHT.search(n.rpartition(".")[2])]
    rivals = {n for n in weights if specs[n].dtype in _FLOAT8 or n == f"{module}.weight"} - {name}
    if leaf != "weight" and (rivals or not module):
        siblings = [other for other in siblings if _are_called_alike(leaf, other.rpartition(".")[2])]
    return [*siblings, *modules.get(owner, [])]


def _are_called_alike(leaf: str, other: str) -> bool:
    """Whether two parameters of a module belong together: `up_blocks` and `up_scales`, or `scale_up`."""
    words = leaf.split("_")
    stem = words[:-1] or words
    others = other.split("_")
    return any(others[n : n + len(stem)] == stem for n in range(len(others)))


def _can_scale(name: str, scale: TensorSpec, weight: TensorSpec) -> bool:
    """Whether a tensor could hold a weight's scales: fewer numbers, finer ones or those of block formats."""
    if _NO_SCALE.search(name.rpartition(".")[2]) or (scale.numel >= weight.numel and scale.numel != 1):
        return False
    if scale.dtype == torch.uint8:
        matrix = len(scale.shape) > 1 and scale.shape[0] == weight.shape[0]
        return (matrix or bool(_SCALE.search(name))) and weight.numel % max(1, scale.numel) == 0
    finer = scale.dtype not in _FLOAT8 or weight.dtype not in _FLOAT8
    return scale.dtype.is_floating_point and (finer or bool(_OF_WEIGHT.search(name)))


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that holds quantized tensors.

    Raises:
        InputError: it is quantized. The message says what to do.
    """
    names = find_quantized(checkpoint)
    if names:
        raise InputError(
            f"{checkpoint.label} is quantized ({len(names)} tensors: {join_names(names)}), and quantized "
            "numbers cannot be merged: dequantize it first (load it with transformers, `model.dequantize()`, "
            "and save that), or give the original weights"
        )
