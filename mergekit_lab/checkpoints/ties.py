"""Weights with two names.

A Hugging Face folder ties its input and output embeddings by a flag in `config.json`, and leaves the second
name out of its files; other programs write both names. Which is which matters twice: a tied weight is merged
once, and written under the name that `transformers` keeps.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec
from mergekit_lab.errors import InputError

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
    r"embed|(^|\.)(shared|wte|lm_head|predictions)\.|(^|\.)(head|output|output_layer)\."
)
_OTHER = re.compile(
    r"norm|pos(ition(al)?)?_?emb|embed_pos|class_?emb|patch|time_?emb|token_type|attention|layers?\.\d|blocks?\.\d"
    r"|(^|\.)(visual|vision_(model|tower|encoder))\.",
    re.IGNORECASE,
)


def read_config(folder: Path | None) -> dict[str, Any]:
    """`config.json` of a folder; empty where there is none.

    Raises:
        InputError: it is not a JSON object.
    """
    if folder is None or not (folder / "config.json").is_file():
        return {}
    try:
        content = json.loads((folder / "config.json").read_text())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{folder / 'config.json'} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{folder / 'config.json'} holds a {type(content).__name__}, not an object")
    return content


def vocabulary_size(config: dict[str, Any]) -> int | None:
    """Rows of the embedding that a configuration announces, its `text_config` included."""
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None


def ties_embeddings(config: dict[str, Any]) -> bool | None:
    """Whether a configuration ties input and output embeddings; None where it does not say."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return None


def is_vocabulary_name(name: str) -> bool:
    """Whether a tensor of this name holds one row a token: an embedding, or the head that reads it back."""
    return bool(_ONE_ROW_A_TOKEN.search(name)) and not _OTHER.search(name)


def candidates(specs: dict[str, TensorSpec], size: int) -> list[list[str]]:
    """Names that could be one weight: same shape and dtype, one row a token; the kept name first."""
    alike: dict[TensorSpec, list[str]] = {}
    for name, spec in specs.items():
        if spec.shape[:1] == (size,) and spec.dtype.is_floating_point and is_vocabulary_name(name):
            alike.setdefault(spec, []).append(name)
    return [sorted(names, key=_preference) for names in alike.values() if len(names) > 1]


def _preference(name: str) -> tuple[int, str]:
    places = [place for place, part in enumerate(_KEPT_FIRST) if part in name]
    return (places[0] if places else len(_KEPT_FIRST), name)


def equal_ties(checkpoint: Checkpoint) -> dict[str, str]:
    """Names under which a folder that ties its embeddings holds the same values again."""
    config = read_config(checkpoint.folder)
    size = vocabulary_size(config)
    if size is None or not ties_embeddings(config):
        return {}
    tied = {}
    for kept, *others in candidates(checkpoint.specs, size):
        values = checkpoint[kept]
        tied.update({name: kept for name in others if torch.equal(checkpoint[name], values)})
    return tied
