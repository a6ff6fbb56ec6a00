"""What an adapter's `adapter_config.json` says, and what of it is not folded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergekit_lab.errors import InputError, listing

ADAPTER_CONFIG = "adapter_config.json"
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out"}
_NO_EFFECT = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "bias", "modules_to_save", "lora_bias", "megatron_core", "qalora_group_size"),
    *("runtime_config", "ensure_weight_tying", "eva_config", "init_lora_weights"),
}
_PLAIN_STARTS = {"gaussian", "orthogonal", "eva"}
"""`init_lora_weights` that leave the base's weights as they are."""


def read_adapter_config(folder: Path, label: str) -> dict[str, Any]:
    """A LoRA adapter's configuration.

    Raises:
        InputError: it cannot be read, or asks for anything that is not folded, by name.
    """
    file = folder / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_text())
        kind = config["peft_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{label}: {file} is not an adapter's configuration ({error!r})") from None
    if kind != "LORA":
        raise InputError(
            f"{label}: adapters of type {kind} are not folded, LORA is: merge it with peft and save that"
        )
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool | None) and not (isinstance(start, str) and start in _PLAIN_STARTS):
        raise InputError(
            f"{label}: init_lora_weights={start!r} changed the base's weights before training, so the adapter "
            "does not fit the base: save it with peft's path_initial_model_for_weight_conversion"
        )
    unknown = [key for key, value in config.items() if key not in _READ | _NO_EFFECT and value]
    if unknown:
        raise InputError(
            f"{label}: the adapter uses {listing(unknown)}, which is not folded here: merge it with peft "
            "(`merge_and_unload`) and give the saved model"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        _check_patterns(f"{label}: {key}", config.get(key) or {})
    return config


def _check_patterns(what: str, patterns: Any) -> None:
    if not isinstance(patterns, Mapping):
        raise InputError(f"{what} is a {type(patterns).__name__}, not a mapping from module to number")
    for pattern in patterns:
        try:
            re.compile(_ending(pattern))
        except re.error as error:
            raise InputError(f"{what} holds {pattern!r}, which is no regular expression ({error})") from None


def _ending(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The first pattern that matches a module's path from one of its dots on."""
    for pattern, value in (patterns or {}).items():
        if re.match(_ending(pattern), module):
            return value
    return default
