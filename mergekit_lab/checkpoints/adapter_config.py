"""What an adapter's `adapter_config.json` says, and what of it is not folded."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import regex

from mergekit_lab.checkpoints.plain_files import read_json
from mergekit_lab.errors import InputError, join_names

ADAPTER_CONFIG = "adapter_config.json"
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"} | {
    *("fan_in_fan_out", "target_parameters")
}
_NO_EFFECT = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "bias", "modules_to_save", "lora_bias", "megatron_core", "qalora_group_size"),
    *("runtime_config", "ensure_weight_tying", "eva_config", "init_lora_weights"),
}
_PLAIN_STARTS = {"gaussian", "orthogonal", "eva", "mica"}
"""`init_lora_weights` that leave the base's weights as they are."""


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """A LoRA adapter's configuration.

    Raises:
        InputError: it cannot be read, or asks for anything that is not folded, by name.
    """
    file = folder / ADAPTER_CONFIG
    config = read_json(file)
    try:
        method = config["peft_type"]
    except (KeyError, TypeError) as error:
        raise InputError(f"{file} is not an adapter's configuration ({error!r})") from None
    if method != "LORA":
        raise InputError(
            f"adapters of type {method} cannot be folded, only LORA: merge it with peft and give the saved "
            "model"
        )
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool | None) and not (isinstance(start, str) and start in _PLAIN_STARTS):
        raise InputError(
            f"init_lora_weights={start!r} changed the base's weights before training, so the adapter "
            "does not fit the base: save it with peft's path_initial_model_for_weight_conversion"
        )
    unknown = [key for key, value in config.items() if key not in _READ | _NO_EFFECT and value]
    if unknown:
        raise InputError(
            f"the adapter uses {join_names(unknown)}, which cannot be folded: merge it with peft "
            "(`merge_and_unload`) and give the saved model"
        )
    return config


def match_patterns(config: Mapping[str, Any], key: str, default: str, modules: Iterable[str]) -> dict[str, Any]:
    """Each module's number in `config[key]`, a mapping from pattern to number, or else `config[default]`.

    As in peft a pattern is a regular expression for a module's path from one of its dots on, and the first that
    matches counts. A file from elsewhere may hold one that would backtrack, or expand, without end.

    Raises:
        InputError: no mapping, or a pattern that is no regular expression or costs too much, by name.
    """
    patterns = config.get(key) or {}
    if not isinstance(patterns, Mapping):
        raise InputError(f"{key} is a {type(patterns).__name__}, not a mapping from module to number")
    values = dict.fromkeys(modules, config.get(default))
    end = time.process_time() + _PATTERN_SECONDS
    for pattern, value in reversed(list(patterns.items())):
        holds = f"{key} holds {pattern[:200]!r}, which"
        if "{" in pattern or len(pattern) > _LONGEST_PATTERN:
            raise InputError(f"{holds} counts repeats with braces or is very long: write it without")
        if _RECURSION.search(pattern):
            raise InputError(f"{holds} refers to itself or to a group, or ignores case: write it without")
        try:
            ending = regex.compile(rf"(.*\.)?({pattern})$")
            for module in values:
                if ending.match(module, timeout=max(0.0, end - time.process_time())):
                    values[module] = value
        except (regex.error, RecursionError) as error:
            raise InputError(f"{holds} is not a regular expression ({error})") from None
        except TimeoutError:
            raise InputError(
                f"{holds} takes too long to match with names: write it without repeats of repeats"
            ) from None
    return values


_PATTERN_SECONDS = 10.0
"""Of a processor, for all patterns of one kind; a thousand of them with a thousand modules take three."""
_LONGEST_PATTERN = 10_000
_RECURSION = regex.compile(
    r"\(\?(?:R|[+-]?\d|&|P>|P=|\(|\(?DEFINE|[a-zA-Z0-9-]*[ifIF][a-zA-Z0-9-]*[:)])|\\[1-9gL]"
)
"""Groups that call groups or the whole pattern, conditions, references back, and flags that ignore case. Names
of modules need none. What the first expand to has no bound, and folding the last takes minutes."""
