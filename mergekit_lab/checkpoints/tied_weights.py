"""Weights with two names.

A Hugging Face folder ties its input and output embeddings by a flag in `config.json`, or by what its model type
does where the flag is not there, and leaves the second name out of its files; other programs write both names.
Which is which matters twice: a tied weight is merged once, and written under the name that `transformers`
keeps. The embeddings of an encoder and of a decoder that are `shared` are one weight whatever the flag says
(T5 1.1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec
from mergekit_lab.checkpoints.plain_files import read_object

_KEPT_FIRST = (
    "shared.",
    "word_embeddings.",
    "embed_tokens.",
    "wte.",
    "embed",
    "predictions.bias",
    "lm_head.bias",
)
_ONE_ROW_A_TOKEN = re.compile(
    r"embed|(^|\.)(shared|wte|predictions)\.|(^|[._])(lm_head|vocab_projector|lm_loss)\."
)
_ANY_HEAD = re.compile(
    r"(^|\.)(head|output|output_layer|output_projection|proj_out|pred_layer\.proj)\.|^decoder\."
)
_OTHER = re.compile(
    r"(?<!prelayer)norm|pos(ition(al)?)?_?emb|embed_pos|class_?emb|label|patch|time_?emb|token_type|attention|hidden_mapping"
    r"|layers?\.\d|blocks?\.\d|(^|\.)(visual|vision_(model|tower|encoder))\.",
    re.IGNORECASE,
)
_SHARED = re.compile(r"(^|\.)(shared|(encoder|decoder)\.embed_tokens)\.weight$")
_TIED_UNLESS_SAID = {
    *("albert", "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot"),
    *("blenderbot-small", "bloom", "camembert", "cohere", "convbert", "data2vec-text", "deberta"),
    *("deberta-v2", "distilbert", "electra", "ernie", "esm", "falcon", "falcon_mamba", "flaubert", "fnet"),
    *("funnel", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo"),
    *("gpt_neox_japanese", "jetmoe", "layoutlm", "led", "longformer", "longt5", "lxmert"),
    *("m2m_100", "mamba", "marian", "mbart", "megatron-bert", "mobilebert", "modernbert", "mpnet", "mpt"),
    *("mra", "mvp", "nllb-moe", "nystromformer", "openai-gpt", "opt", "paligemma", "pegasus", "pegasus_x"),
    *("plbart", "prophetnet", "recurrent_gemma", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("smollm3", "squeezebert", "starcoder2", "switch_transformers", "t5", "trocr", "visual_bert", "whisper"),
    *("xglm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod", "yoso", "zamba", "zamba2"),
}
"""Model types whose configuration ties input and output embeddings unless it says otherwise; `transformers` 4
left the flag out where it had this default, 5 writes it always."""


def read_config(folder: Path | None) -> dict[str, Any]:
    """Read `config.json` of a folder; empty if there is none.

    Raises:
        InputError: it is not a JSON object, or no file that can be read.
    """
    return {} if folder is None else read_object(folder / "config.json")


def set_keys(
    config: dict[str, Any], values: Mapping[str, Any], parts: Iterable[str] | None = None, always: bool = False
) -> None:
    """Give keys of a configuration, and of its parts, other values where they have these keys.

    Args:
        parts: their keys; None: all that end with `_config`.
        always: whether the configuration itself gets keys that it lacks.
    """
    names = [key for key in config if key.endswith("_config")] if parts is None else parts
    for part in (config, *map(config.get, names)):
        if isinstance(part, dict):
            part |= {key: value for key, value in values.items() if key in part or (always and part is config)}


def read_class_name(folder: Path | None) -> str | None:
    """The class of transformers that a folder's configuration names, the first of several."""
    named = read_config(folder).get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def read_vocabulary_size(config: dict[str, Any]) -> int | None:
    """The number of rows of the embedding by a configuration, or by its `text_config`."""
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None


def is_tying_embeddings(config: dict[str, Any]) -> bool | None:
    """Whether a configuration ties input and output embeddings, by its model type where it does not say; None
    if that does not say either.
    """
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    for part in parts:
        if part.get("scale_decoder_outputs") is False:  # T5 1.1, whose flag transformers 5 sets for `shared`
            return False
        if isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    kinds = [kind for part in parts if isinstance(kind := part.get("model_type"), str)]
    return True if any(kind in _TIED_UNLESS_SAID for kind in kinds) else None


def is_vocabulary_name(name: str) -> bool:
    """Whether a tensor of this name has one row per token: an embedding, or a head that reads it back."""
    return bool(_ONE_ROW_A_TOKEN.search(name)) and not _OTHER.search(name)


def can_be_vocabulary(name: str) -> bool:
    """Whether it may do so: `head.weight` has one row per token in some models, and one per class in others."""
    return is_vocabulary_name(name) or bool(_ANY_HEAD.search(name) and not _OTHER.search(name))


def find_tied_groups(specs: Mapping[str, TensorSpec], size: int | None, tied: bool) -> list[list[str]]:
    """Names that would be one weight: same shape and dtype, one row a token; the kept name first.

    Args:
        size: rows of the vocabulary; without it there are no groups.
        tied: whether input and output embeddings are; if not, only those of an encoder and a decoder that share
            one may be.
    """
    alike: dict[TensorSpec, list[str]] = {}
    for name, spec in specs.items():
        if spec.shape[:1] == (size,) and spec.dtype.is_floating_point and can_be_vocabulary(name):
            alike.setdefault(spec, []).append(name)
    groups = [sorted(names, key=_rank_name) for names in alike.values()]
    if not tied:
        groups = [[name for name in group if _SHARED.search(name)] for group in groups]
        groups = [group for group in groups if group and group[0].endswith("shared.weight")]
    return [group for group in groups if len(group) > 1]


def _rank_name(name: str) -> tuple[int, str]:
    ranks = [rank for rank, part in enumerate(_KEPT_FIRST) if part in name and "embed_out." not in name]
    return (ranks[0] if ranks else len(_KEPT_FIRST), name)


def find_configured_ties(checkpoint: Checkpoint, read: bool = True) -> dict[str, str]:
    """Second names of weights that the configuration ties, each with the first; with `read` where values agree,
    else as names and shapes tell."""
    return {
        name: kept
        for kept, *others in find_configured_groups(checkpoint)
        for name in others
        if not read or torch.equal(checkpoint[name], checkpoint[kept])
    }


def find_configured_groups(checkpoint: Checkpoint) -> list[list[str]]:
    """`find_tied_groups` as the configuration beside the files has them."""
    config = {**read_config(checkpoint.folder), **checkpoint.changed}
    return find_tied_groups(checkpoint.specs, read_vocabulary_size(config), bool(is_tying_embeddings(config)))
