"""What happens before and behind a model: images and sound are made tensors, features are pooled.

A merge takes these settings from the base. Weights that were trained with others compute something else, and no
tensor shows it. Keys that both sides have are compared: releases differ in what they write at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mergekit_lab.checkpoints.plain_files import read_json, read_object
from mergekit_lab.errors import abbreviate

_DECIDING = {
    *("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std", "do_flip_channel_order", "patch_size", "merge_size"),
    *("sampling_rate", "n_fft", "hop_length", "win_length", "num_mel_bins", "feature_size", "chunk_length"),
    *("mean", "std", "interpolation", "resize_mode"),  # of open_clip
}
_POOLING = re.compile(r"pooling_mode_(.+?)(_tokens?)?")


def describe_processing(base: Path | None, experts: Mapping[str, Path | None]) -> list[str]:
    """Warnings of experts that were trained behind other settings than the base's, which the result has."""
    notes = []
    own = _read_settings(base)
    for name, folder in experts.items():
        theirs = _read_settings(folder) if folder != base else {}
        differing = [key for key in theirs if key in own and theirs[key] != own[key]]
        if differing:
            values = [f"{k} is {abbreviate(theirs[k])} ({abbreviate(own[k])} in the base)" for k in differing]
            notes.append(
                f"warning: {name} was trained with other settings around the model, and the result has the "
                f"base's: {'; '.join(values)}"
            )
        if "modules" in theirs and "modules" not in own and base is not None:
            notes.append(
                f"warning: {name} is a model of sentence-transformers ({', '.join(theirs['modules'])}; "
                f"pooling: {theirs.get('pooling', 'unknown')}), and the base is none: the result has no "
                "modules.json"
            )
    return notes


def _read_settings(folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {}
    whole = read_object(folder / "processor_config.json")
    own = [
        *(read_object(folder / "preprocessor_config.json"), whole.get("image_processor")),
        *(whole.get("feature_extractor"), read_object(folder / "open_clip_config.json").get("preprocess_cfg")),
    ]
    video = [read_object(folder / "video_preprocessor_config.json"), whole.get("video_processor")]
    known = _select(own) | {f"video {key}": value for key, value in _select(video).items()}
    return known | _read_modules(folder)


def _select(parts: Iterable[Any]) -> dict[str, Any]:
    """What decides, of several files' settings."""
    settings = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
    known = {key: value for key, value in settings.items() if key in _DECIDING and value is not None}
    return known | {key: _list_numbers(known[key]) for key in ("size", "crop_size") if key in known}


def _list_numbers(size: Any) -> list[Any]:
    """A size as one number, or as several by name: releases write both."""
    values = size.values() if isinstance(size, dict) else size if isinstance(size, list) else [size]
    return sorted({value for value in values if isinstance(value, int)})


def _read_modules(folder: Path) -> dict[str, Any]:
    """Of sentence-transformers: which modules there are, how features are pooled, what stands before texts."""
    if not (folder / "modules.json").is_file():
        return {}
    modules = [module for module in read_json(folder / "modules.json") if isinstance(module, dict)]
    settings: dict[str, Any] = {"modules": [str(module.get("type")).split(".")[-1] for module in modules]}
    for module in modules:
        config = read_object(folder / str(module.get("path") or ".") / "config.json")
        modes = {match[1] for k, v in config.items() if v is True and (match := _POOLING.fullmatch(k))}
        modes |= {config["pooling_mode"]} if isinstance(config.get("pooling_mode"), str) else set()
        if modes:
            settings["pooling"] = ", ".join(sorted(modes))
    lower = read_object(folder / "sentence_bert_config.json").get("do_lower_case")
    prompts = read_object(folder / "config_sentence_transformers.json").get("prompts")
    if isinstance(lower, bool):
        settings["do_lower_case"] = lower
    if isinstance(prompts, dict):
        settings["prompts"] = {key: prompt for key, prompt in prompts.items() if prompt}
    return settings
