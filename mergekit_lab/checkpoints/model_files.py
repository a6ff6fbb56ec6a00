"""A model's files besides its weights: configurations, tokenizers, processors, licenses.

A folder of sentence-transformers has modules of its own beside the model (`modules.json` lists them); they come
along, with their weights if they have any, which are never merged.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from mergekit_lab.checkpoints.libraries import NAMED_WEIGHTS, OPEN_CLIP, TRANSFORMERS, Library
from mergekit_lab.checkpoints.plain_files import check_file, read_json
from mergekit_lab.checkpoints.tied_weights import read_config, set_keys
from mergekit_lab.errors import InputError, join_names

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


Files = Mapping[str, Path | str]
"""What goes into a folder, by name: a file to be copied, or a text to be written."""


def plan_tokenizer_files(source: Path, added: Sequence[Mapping[str, Any]] = ()) -> Files:
    """The tokenizer's files and chat templates of a folder.

    Args:
        added: entries of `added_tokens` that its `tokenizer.json` gets besides its own.

    Raises:
        InputError: one of them cannot be copied, see `plan_model_files`.
    """
    files = _find(source, _TOKENIZER)
    if added:
        content = read_json(source / "tokenizer.json")
        content["added_tokens"] = [*(content.get("added_tokens") or ()), *added]
        files["tokenizer.json"] = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return files


def find_tokenizer_files(source: Path) -> list[Path]:
    """The tokenizer's files and chat templates in a folder, in the order of their names."""
    return [source / name for name in plan_tokenizer_files(source)]


def plan_model_files(
    source: Path,
    library: Library | None = None,
    dtype: torch.dtype | None = None,
    vocabulary: int | None = None,
    changed: Mapping[str, Any] | None = None,
) -> Files:
    """Configuration, processor and license files of a folder, as they belong beside weights that were merged.

    Links are followed, except out of the hub's cache, where nobody makes any.

    Args:
        library: whose files are wanted; None: all.
        dtype: written into `config.json`, if given.
        vocabulary: `vocab_size` in the configuration, if given.
        changed: other keys of `config.json`, with their values.

    Raises:
        InputError: a link that leads nowhere, or out of the hub's cache; a pipe; a pointer of Git LFS; a
            damaged configuration.
    """
    config = read_config(source)
    patterns = [*_LICENSES, *(p for each, own in _MODEL.items() if library in (each, None) for p in own)]
    if library is not OPEN_CLIP:
        patterns += _CODE if "auto_map" in json.dumps(config) else ()
        patterns += (*_SENTENCES, *(f"{part}/{p}" for part in _read_parts(source) for p in _PART))
    files = _find(source, patterns)
    # what is written is neither quantized nor in a file of another name
    stale = [config.pop(key, None) for key in ("quantization_config", "compression_config", NAMED_WEIGHTS)]
    if "config.json" in files and (dtype is not None or vocabulary is not None or any(stale) or changed):
        if dtype is not None:
            if not {"dtype", "torch_dtype"} & config.keys():
                config["dtype"] = ""
            set_keys(config, dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch.")))
        if vocabulary is not None:
            set_keys(config, {"vocab_size": vocabulary}, ("text_config", "llm_config"))
        set_keys(config, changed or {}, ("text_config",), always=True)
        files["config.json"] = json.dumps(config, indent=2) + "\n"
    if "open_clip_config.json" in files and vocabulary is not None:
        files["open_clip_config.json"] = _adapt_open_clip(source / "open_clip_config.json", vocabulary)
    return files


def write_files(files: Files, folder: Path) -> dict[str, int]:
    """Put planned files into a folder; their names, each with the bytes that it must have."""
    sizes = measure_files(files)
    for name, content in files.items():
        if "/" in name:
            (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            (folder / name).write_text(content, encoding="utf-8")
        else:
            shutil.copyfile(content, folder / name)
    return sizes


def measure_files(files: Files) -> dict[str, int]:
    """The bytes that planned files will have."""
    return {n: len(c.encode()) if isinstance(c, str) else c.stat().st_size for n, c in files.items()}


def find_parts_with_weights(source: Path) -> list[str]:
    """Modules of sentence-transformers, outside the model, that have weights.

    Raises:
        InputError: `modules.json` is none, or names a folder elsewhere.
    """
    return [
        part
        for part in _read_parts(source)
        if any(Path(name).suffix in _PART_WEIGHTS for name in os.listdir(source / part))
    ]


def _read_parts(source: Path) -> list[str]:
    file = source / _MODULES
    if not os.path.lexists(file):
        return []
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(m, dict) and "path" in m for m in modules):
        raise InputError(f"{file} does not list modules of sentence-transformers")
    names = [str(module["path"]) for module in modules]
    outside = [name for name in names if name and (Path(name).name != name or name in {".", ".."})]
    if outside:
        raise InputError(f"{file} names folders outside its own ({join_names(outside)}): refused")
    return [name for name in names if name and (source / name).is_dir()]


def _adapt_open_clip(file: Path, vocabulary: int) -> str:
    config = read_json(file)
    try:
        config["model_cfg"]["text_cfg"]["vocab_size"] = vocabulary
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{file.name} has no model_cfg.text_cfg to put the vocabulary into ({error!r})"
        ) from None
    return json.dumps(config, indent=2) + "\n"


def _find(source: Path, patterns: Iterable[str]) -> dict[str, Path | str]:
    """The files of a folder that match, in the order of their names."""
    matching: set[str] = set()
    for pattern in patterns:
        inner, _, wanted = pattern.rpartition("/")
        held = os.listdir(source / inner) if (source / inner).is_dir() else []
        matching |= {os.path.join(inner, name) for name in held if fnmatchcase(name, wanted)}
    names = sorted(name for name in matching if not (source / name).is_dir())
    for name in names:
        check_file(source / name)
    _refuse_odd_links(source, names)
    return {name: source / name for name in names}


def _refuse_odd_links(source: Path, names: Iterable[str]) -> None:
    """Refuse links of the hub's cache to anywhere else than its own blobs."""
    real = source.resolve()
    blobs = real.parent.parent / "blobs"
    if real.parent.name != "snapshots" or not blobs.is_dir():
        return
    targets = {name: (source / name).resolve() for name in names}
    outside = [n for n, target in targets.items() if not any(target.is_relative_to(f) for f in (real, blobs))]
    if outside:
        raise InputError(f"{source} has links that lead out of it ({join_names(outside)}): refused")
