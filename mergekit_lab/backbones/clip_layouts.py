"""CLIP weights in other layouts: transformers' `CLIPModel` and `CLIPVisionModel`, and published state dicts.

This package names weights as open_clip's whole model does (`visual.…`). transformers splits `in_proj` into
queries, keys and values, and transposes the projections. Its vision model has no projection. The backbone's is
then taken, because fine-tuning that model cannot change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from mergekit_lab.errors import InputError, join_names

_TOWERS = {
    "visual.": {
        "class_embedding": "vision_model.embeddings.class_embedding",
        "conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "ln_pre": "vision_model.pre_layrnorm",
        "ln_post": "vision_model.post_layernorm",
        "transformer.resblocks": "vision_model.encoder.layers",
        "proj": "visual_projection.weight",
    },
    "": {
        "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "ln_final": "text_model.final_layer_norm",
        "transformer.resblocks": "text_model.encoder.layers",
        "text_projection": "text_projection.weight",
        "logit_scale": "logit_scale",
    },
}
_THEIRS = {tower + own: theirs for tower, names in _TOWERS.items() for own, theirs in names.items()}
_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_TRANSPOSED = {"visual.proj", "text_projection"}
_PATCHES = "embeddings.patch_embedding.weight"
_PROJECTION = "visual.proj"


def is_transformers(names: Mapping[str, Tensor]) -> bool:
    """Whether these are names of transformers' CLIP, whole or vision only, with or without a prefix."""
    return any(name.endswith(_PATCHES) for name in names)


def is_image_tower(names: Iterable[str]) -> bool:
    """Whether these are names of only an image tower, in either layout, with or without a prefix."""
    names = list(names)
    if any(name.endswith(_PATCHES) for name in names):
        return not any("text_model." in name for name in names)
    return any(name.endswith("visual.conv1.weight") for name in names) and all("visual." in n for n in names)


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert open_clip's names and layout to transformers', of a whole model or of an image tower.

    Args:
        state: a state dict with `visual.…`, with or without a text tower.

    Raises:
        InputError: a name that has no counterpart.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(("attn.in_proj_weight", "attn.in_proj_bias")):
            stem, _, ending = name.rpartition("attn.in_proj_")
            layer = _rename(f"{stem}ln_1.bias").removesuffix("layer_norm1.bias")
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                out[f"{layer}self_attn.{part}_proj.{ending}"] = piece.contiguous()
        else:
            out[_rename(name)] = tensor.t().contiguous() if name in _TRANSPOSED else tensor
    return out


def from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert transformers' names and layout to open_clip's: the inverse of `to_transformers`.

    Raises:
        InputError: a name has no counterpart, or queries come without keys or values.
    """
    prefix = next(name.removesuffix(_PATCHES) for name in state if name.endswith(_PATCHES))
    named = {
        name if prefix else f"vision_model.{name}": tensor
        for name, tensor in state.items()
        if not name.endswith("position_ids")
    }
    out: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if ".self_attn.q_proj." in name:
            parts = [name.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]
            if missing := [part for part in parts if part not in named]:
                raise InputError(f"the CLIP weights lack {join_names(missing)}")
            stem, _, ending = name.rpartition("self_attn.q_proj.")
            layer = _restore(f"{stem}layer_norm1.bias").removesuffix("ln_1.bias")
            out[f"{layer}attn.in_proj_{ending}"] = torch.cat([named[part] for part in parts])
        elif ".self_attn.k_proj." not in name and ".self_attn.v_proj." not in name:
            own = _restore(name)
            out[own] = tensor.t().contiguous() if own in _TRANSPOSED else tensor
    return out


def _translate(name: str, names: Mapping[str, str], in_block: Mapping[str, str], whose: str) -> str:
    """A name of the one library in the other; messages say whose names those are."""
    stem = max((stem for stem in names if f"{name}.".startswith(f"{stem}.")), key=len, default=None)
    if stem is None:
        raise InputError(f"{name!r} has no counterpart in {whose} CLIP")
    renamed = names[stem] + name.removeprefix(stem)
    for own, theirs in in_block.items():
        for ending in ("weight", "bias"):
            if renamed.endswith(f".{own}.{ending}"):
                return renamed.removesuffix(f"{own}.{ending}") + f"{theirs}.{ending}"
    return renamed


_rename = partial(_translate, names=_THEIRS, in_block=_BLOCK, whose="transformers'")
_restore = partial(
    _translate, names={v: k for k, v in _THEIRS.items()}, in_block={v: k for k, v in _BLOCK.items()},
    whose="open_clip's",
)  # fmt: skip


def as_image_tower(state: Mapping[str, Tensor], base: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Convert published weights to a state dict of the backbone's image tower.

    Args:
        state: weights in transformers' layout, or with open_clip's names. These may be an image tower, a whole
            model, or below a prefix (`model.visual.…`, as in task arithmetic's encoders).
        base: the backbone's image tower.
        label: the weights' name in messages.

    Raises:
        InputError: tensors are missing or have another shape, so the architecture differs.
    """
    if is_transformers(state):
        state = from_transformers(state)
    else:
        start = next(
            (name.removesuffix("visual.conv1.weight") for name in state if "visual.conv1.weight" in name), ""
        )
        state = {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}
    tower = {name: state[name] for name in base if name in state}
    if _PROJECTION in base:
        tower.setdefault(_PROJECTION, base[_PROJECTION])
    missing = base.keys() - tower.keys()
    if missing:
        raise InputError(
            f"{label} lacks {len(missing)} tensors of the backbone's image tower ({join_names(missing, 3)}): "
            "is it a CLIP image tower of this architecture?"
        )
    other = [name for name, tensor in tower.items() if tensor.shape != base[name].shape]
    if other:
        name = min(other)
        raise InputError(
            f"{label}: {name!r} is {list(tower[name].shape)}, and the backbone's is {list(base[name].shape)}: "
            "it was fine-tuned from another architecture"
        )
    return {name: tower[name].to(base[name].dtype) for name in base}
