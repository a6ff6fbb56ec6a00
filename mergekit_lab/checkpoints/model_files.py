"""What belongs to a model beside its weights: configurations, tokenizers, processors, licenses.

A folder of sentence-transformers has modules of its own beside the model (`modules.json` lists them); they come
along, with their weights if they have any, which are never merged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from glob import escape
from pathlib import Path
from typing import Any

import torch

from mergekit_lab.checkpoints.libraries import OPEN_CLIP, TRANSFORMERS, Library
from mergekit_lab.checkpoints.tied_weights import read_config
from mergekit_lab.errors import InputError, listing

_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "*.tiktoken", "tekken.json", "bpe.codes", "target.spm", "source.spm"),
    *("chat_template*", "additional_chat_templates/*.jinja"),
)
_LICENSES = ("LICENSE*", "NOTICE*")
_MODEL = {
    TRANSFORMERS: (
        *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
        *("image_processor*.json", "feature_extractor*.json", "video_preprocessor_config.json"),
    ),
    OPEN_CLIP: ("open_clip_config.json",),
}
_CODE = ("configuration_*.py", "modeling_*.py", "tokenization_*.py", "*processing_*.py")
_MODULES = "modules.json"
_SENTENCES = (_MODULES, "config_sentence_transformers.json", "sentence_*_config.json")
_PART = ("*.json", "*.txt", "*.model", "*.safetensors", "*.bin")
_PART_WEIGHTS = {".safetensors", ".bin"}


def copy_tokenizer_files(source: Path, folder: Path) -> list[str]:
    """Copy the tokenizer's files and chat templates; their names."""
    return _copy(source, folder, _TOKENIZER)


def tokenizer_files(source: Path) -> list[Path]:
    """The tokenizer's files and chat templates in a folder, in the order of their names."""
    return _matching(source, _TOKENIZER)


def copy_model_files(
    source: Path,
    folder: Path,
    library: Library | None = None,
    dtype: torch.dtype | None = None,
    vocabulary: int | None = None,
    changed: Mapping[str, Any] | None = None,
) -> list[str]:
    """Copy configuration, processor and license files; their names.

    Args:
        library: whose files are wanted; None: all.
        dtype: written into `config.json`, if given.
        vocabulary: `vocab_size` in the configuration, if given.
        changed: other keys of `config.json`, with their values.

    Raises:
        InputError: a link that leads out of `source`; a damaged configuration.
    """
    config = read_config(source)
    patterns = [*_LICENSES, *(p for each, own in _MODEL.items() if library in (each, None) for p in own)]
    if library is not OPEN_CLIP:
        patterns += _CODE if "auto_map" in json.dumps(config) else ()
        patterns += (*_SENTENCES, *(f"{escape(part)}/{p}" for part in _parts(source) for p in _PART))
    names = _copy(source, folder, patterns)
    quantized = config.pop("quantization_config", None)  # the weights that are written are not
    if "config.json" in names and (dtype or vocabulary is not None or quantized is not None or changed):
        _adapt(config, dtype, vocabulary)
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part |= {k: v for k, v in (changed or {}).items() if part is config or k in part}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if "open_clip_config.json" in names and vocabulary is not None:
        _adapt_open_clip(folder / "open_clip_config.json", vocabulary)
    return names


def parts_with_weights(source: Path) -> list[str]:
    """Modules of sentence-transformers beside the model that hold weights of their own.

    Raises:
        InputError: `modules.json` is none, or names a folder elsewhere.
    """
    return [
        name for name in _parts(source) if any(f.suffix in _PART_WEIGHTS for f in (source / name).iterdir())
    ]


def _parts(source: Path) -> list[str]:
    file = source / _MODULES
    if not file.is_file():
        return []
    try:
        names = [str(module["path"]) for module in json.loads(file.read_text())]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{file} does not list modules of sentence-transformers ({error!r})") from None
    outside = [name for name in names if name and (Path(name).name != name or name in {".", ".."})]
    if outside:
        raise InputError(f"{file} names folders outside its own ({listing(outside)}): refused")
    return [name for name in names if name and (source / name).is_dir()]


def _adapt(config: dict[str, Any], dtype: torch.dtype | None, vocabulary: int | None) -> None:
    parts = [
        config,
        *(part for key, part in config.items() if key.endswith("_config") and isinstance(part, dict)),
    ]
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and not {"dtype", "torch_dtype"} & config.keys():
        config["dtype"] = name
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            if dtype is not None and key in part:
                part[key] = name
    sized = [
        part for part in (config, config.get("text_config"), config.get("llm_config")) if isinstance(part, dict)
    ]
    for part in sized:
        if vocabulary is not None and "vocab_size" in part:
            part["vocab_size"] = vocabulary


def _adapt_open_clip(file: Path, vocabulary: int) -> None:
    try:
        config = json.loads(file.read_text())
        config["model_cfg"]["text_cfg"]["vocab_size"] = vocabulary
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{file.name} has no model_cfg.text_cfg to put the vocabulary into ({error!r})"
        ) from None
    file.write_text(json.dumps(config, indent=2) + "\n")


def _matching(source: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in source.glob(pattern) if path.is_file()})


def _copy(source: Path, folder: Path, patterns: Iterable[str]) -> list[str]:
    """Copy the files of a folder that match, unless a link leads out of it (and not into the hub's cache)."""
    chosen = _matching(source, patterns)
    roots = (source.resolve(), source.resolve().parent.parent / "blobs")
    names = [str(path.relative_to(source)) for path in chosen]
    outside = [
        name
        for name, path in zip(names, chosen, strict=True)
        if not any(path.resolve().is_relative_to(root) for root in roots)
    ]
    if outside:
        raise InputError(f"{source} has links that lead out of it ({listing(outside)}): refused")
    for name, path in zip(names, chosen, strict=True):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    return names
