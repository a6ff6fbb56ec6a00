"""Recognize and refuse quantized checkpoints, whose numbers mean nothing without their scales.

Libraries give such tensors different names, and new ones come every year. But they store them alike: a weight
in few bits (float8, or integers), and in the same module a smaller tensor that scales it. Some store a marker
beside the weight, and the scale inside the marker or nowhere.
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
"""Types that are quantized only if the tensor is called a weight; others are indices and masks."""
_CONFIGS = ("quantization_config", "compression_config")
_NO_WEIGHT = re.compile(r"bias|scale|zero|(^|_)(index|ids?|g_idx|masks?|shape|invperm)$")
"""Names of integers in ordinary modules, and of what belongs to a packed weight."""
_NO_SCALE = re.compile(
    r"bias|^(?!.*scale|weight_).*(^|_)(b|beta|gamma|mean|var|masks?)$|^weight$|^(embed|head|logit)_scale$"
)
"""Names of what ordinary modules have beside a weight."""
_MARKER = re.compile(
    r"(^|\.)(comfy_quant|scaled_fp8|_extra_state|weight_(format|quantizer)|quant_(state|map|type))(\.|$)"
)
"""Names by which ComfyUI, Transformer Engine, ModelOpt and bitsandbytes mark quantized tensors beside them."""
_SCALE = re.compile(r"scale|absmax|amax", re.IGNORECASE)
_OF_WEIGHT = re.compile(r"weight_?scale|scale_?weight")
_SCALE_WORD = re.compile(r"(inv|de|de?quant)?scales?|inv|abs|a?max|absmax|weights?|w", re.IGNORECASE)
_INNER = re.compile(r"(\._\w+)+$")
"""The end of a name of what a tensor subclass holds, such as `weight._data`."""


def find_quantized(checkpoint: Checkpoint) -> list[str]:
    """Names of tensors whose numbers mean something only together with a scale."""
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
    """The words that a weight's name shares with its scale's, wherever they say what it is: `a.q.weight` and
    `scales.a.q` share `a` and `q`.
    """
    return tuple(word for word in re.split(r"[._]", name) if word and not _SCALE_WORD.fullmatch(word))


def _list_spellings(name: str) -> list[tuple[str, ...]]:
    """The name's words, and those without the first, because `quantization.a.q.scale` may be the scale of
    `model.a.q.weight`.
    """
    words = _split_words(name)
    return [words, words[1:]] if len(words) > 2 else [words]


def _find_scales(
    name: str, specs: Mapping[str, TensorSpec], scales: Mapping[tuple[str, ...], Sequence[str]]
) -> Iterator[str]:
    """Tensors with the name of this weight's scale, or of a scale for a module around it or the whole file.

    A scale of a module may be several numbers only if its name says so: `attn.scale` of several numbers is a
    parameter of its own.
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
    """Other tensors of the weight's module that may belong to this weight, and tensors below its own name."""
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
    """Whether a tensor could hold a weight's scales: fewer numbers, in a finer dtype or as block formats do."""
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
