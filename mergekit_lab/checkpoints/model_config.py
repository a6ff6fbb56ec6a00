"""Configurations of base and experts, compared: what makes the same weights compute something else.

A merge has the base's configuration. Where an expert's differs in what its weights compute (heads, rotary
positions, activation, …), its task vector is meant for another function, and is refused unless the key is in
`allow_config_mismatch`; the table below says which keys these are, and why. Keys that are not in it are named
in a warning. transformers' own reading of both is compared, so that defaults, and older names of keys, are no
difference; what it does not know is compared as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from mergekit_lab.checkpoints.adapters import find_adapter
from mergekit_lab.checkpoints.checkpoint import Checkpoint
from mergekit_lab.checkpoints.in_memory import silence_transformers
from mergekit_lab.checkpoints.libraries import OPEN_CLIP, find_library
from mergekit_lab.checkpoints.plain_files import flatten, read_object
from mergekit_lab.checkpoints.tied_weights import read_config
from mergekit_lab.errors import join_names

_IGNORED = re.compile(
    # names, versions, where it comes from
    r"^_(?!class_name)|version$|name_or_path|^architectures$|^auto_map$|dtype|^tokenizer_class$|^language$|finetuning_task"
    # what only training sees
    r"|(?<!token_)drop(?!_vision)|initializer|init_(?!option)|_init(?!_option)|aux_loss|loss_|_loss|jitter|gradient_checkpointing|^problem_type$"
    # what a call chooses, or computes alike
    r"|^use_cache$|^output_(hidden_states|attentions|router_logits|past|scores)$|return_dict|chunk_size_feed_forward|pretraining_tp|attn_implementation"
    # what shapes and names of tensors show
    r"|^(vocab|hidden|intermediate|embedding|ffn|output)_(size|dim)$|^num(_(?!kv_)\w+)?_layers$"
    r"|^n_(layer|embd|inner|positions)$|^d_(model|ff)$|^(projection|embed)_dim$|^width$|^layers$|^type_vocab_size$|^max_window_layers$"
    r"|^is_encoder_decoder$"
    # what vocabularies, ties and labels are compared for, or generation settings hold
    r"|_token_ids?$|_token_index$|^tie_|^quantization_config$|^(id2label|label2id|num_labels|label_names)$"
    r"|^(max|min)_(new_)?(length|tokens)$|^(do_sample|temperature|top_[kp]|num_beams|prefix|task_specific_params)$"
    r"|^(repetition|length)_penalty$|^early_stopping$|^no_repeat_ngram_size$|^forced_|suppress_tokens"
)
_ATTENTION = r"att|mixer|qkv"
_DECIDING = {
    "how matrices are cut into heads": (r"head|key_value|^d_kv$|kv_(channels|groups)|multi_query", _ATTENTION),
    "positions": (
        r"rope|rotary|alibi|original_max_position|position_embeddings?_type|relative_(attention|position)"
        r"|max_distance|pos_att|position_buckets|rel_pos|sinusoidal|encoding_temperature",
        rf"{_ATTENTION}|emb|pos",
    ),
    "the activation": (
        r"(^|_)act(_|$)|activation|gelu|glu|feed_forward_proj|^act_kwargs",
        rf"^(?!.*({_ATTENTION}|norm|emb))",
    ),
    "norms": (r"eps(ilon)?$|norm", r"norm|(^|[._])ln"),
    "what attends to what": (
        r"sliding|window|layer_types|causal|is_decoder|cross_attention"
        r"|attention_(types?|chunk|context)|attn_type|bidirectional|full_?att|k_eq_v|global_attn|local_attention|kv_shared",
        _ATTENTION,
    ),
    "scales": (
        r"softcap|multiplier|scal(e|ing)|query_pre_attn|logit|temperature_tuning|token_dropout|time_step_limit"
        r"|clip_qkv|_clip(_|$)|slope",
        "",
    ),
    "which experts a token goes to": (
        r"expert|router|routing|gating|topk|top_k|n_group|scoring|moe",
        "expert|router|gate|moe",
    ),
    "how features are pooled and chosen": (
        r"pool|feature_(layer|select)|select_(layer|strategy)|merge_size|shuffle|^mm_|summary_|stride|drop_vision"
        r"|dilation|atrous|pad_mode|padding(?!_(side|idx))|visual_indexes",
        "",
    ),
    "the order of a layer's parts": (r"parallel|residual|pre_ln|post_ln", ""),
}
"""Keys that decide what weights of the same shapes compute, by what they decide, and what is in the names of
these weights: refused if one is merged. Others: a warning."""
_PARTS = ("text_config", "llm_config", "vision_config", "audio_config")
_PART_NAMES = {
    "vision": "vision|visual|vit|image",
    "audio": "audio|speech|sound",
    "image": "image|vision|visual",
}
"""What stands in the names of a part's tensors, where that is not what its configuration is called."""
_TEXT = {"text", "llm"}
"""Parts that have all names of no other part."""
_HEAD = re.compile(r"(^|\.)(classifier|score|logits_proj|classification_head|head)(\.|$)")


class Mismatch(NamedTuple):
    """A key of two configurations, with the base's value and the expert's."""

    key: str
    base: Any
    expert: Any
    decides: str | None

    def __str__(self) -> str:
        return f"{self.key} is {_abbreviate(self.expert)} ({_abbreviate(self.base)} in the base)"

    def is_allowed(self, keys: Iterable[str]) -> bool:
        own = (self.key, *self.key.split("."))
        return any(fnmatchcase(name, key) for key in keys for name in own)


class Compared(NamedTuple):
    """What comparing configurations found, in sentences."""

    notes: list[str]
    problems: list[str]


def compare_configs(
    base: Checkpoint,
    experts: Mapping[str, Checkpoint],
    allowed: Sequence[str] = (),
    is_merged: Callable[[str], bool] = lambda name: True,
) -> Compared:
    """Compare every expert's configuration with the base's.

    Args:
        allowed: keys that may differ, whole (`rope_parameters.rope_theta`) or in part (`rope_theta`); patterns.
        is_merged: whether a tensor is; a key matters only where weights are merged that it decides about.
    """
    compared = Compared([], [])
    heads = [name for name in base if _HEAD.search(name) and is_merged(name)]
    labels = next((names for c in (base, *experts.values()) if (names := _name_labels(c))), [])
    for name, expert in experts.items():
        related = 2 * len(base.keys() & expert.keys()) >= len(expert)  # others are refused by their names
        mismatches = _list_mismatches(base, expert) if related else []
        own = _name_labels(expert) if any(head in expert for head in heads) else []
        if own and own != labels:
            key = "id2label" if "id2label" in read_config(_find_folder(expert)) else "label_names"
            mismatches.append(Mismatch(key, labels, own, "what a head's rows stand for"))
        refused = [
            m for m in mismatches if m.decides and not m.is_allowed(allowed) and _matters(m, base, is_merged)
        ]
        noted = [m for m in mismatches if m not in refused]
        if refused:
            decides = join_names(dict.fromkeys(m.decides or "" for m in refused))
            keys = ",".join(dict.fromkeys(m.key.split(".")[-1] for m in refused))
            compared.problems.append(
                f"expert {name!r} has another configuration: {'; '.join(map(str, refused))}. This decides "
                f"{decides}, and the result has the base's: allow_config_mismatch=[{keys}] merges it anyway"
            )
        if noted:
            compared.notes.append(
                f"warning: the configuration of {name} differs, and the result has the base's: "
                f"{'; '.join(map(str, noted))}"
            )
    return compared


def _matters(mismatch: Mismatch, base: Checkpoint, is_merged: Callable[[str], bool]) -> bool:
    """Whether a merged tensor is among those that a key decides about, by their names. If no tensor of the
    model has such a name, any merged tensor counts.
    """
    *above, _ = mismatch.key.split(".")
    stems = [re.sub("_?(config|cfg)$", "", key) for key in above if re.search("config$|cfg$|coder$", key)]
    names = list(base)
    for stem in stems:
        if stem in _TEXT:
            others = "|".join(_PART_NAMES.values())
            own = [name for name in names if not re.search(rf"(^|[._])({others})", name)]
        else:
            own = [name for name in names if re.search(rf"(^|[._])({_PART_NAMES.get(stem, stem)})", name)]
        names = own or names
    pattern = _DECIDING[mismatch.decides][1] if mismatch.decides in _DECIDING else ""
    names = [name for name in names if re.search(pattern, name, re.IGNORECASE)] or names
    return any(map(is_merged, names))


def _list_mismatches(base: Checkpoint, expert: Checkpoint) -> list[Mismatch]:
    folders = (_find_folder(base), _find_folder(expert))
    if None in folders or folders[0] == folders[1]:
        return []
    if find_library(base) is OPEN_CLIP:
        own, theirs = (_open_clip_config(folder) for folder in folders if folder is not None)
        return _list_differences(own, theirs) if own and theirs else []
    raw = [read_config(folder) for folder in folders]
    if not all(raw) or not _list_differences(raw[0], raw[1]):
        return []
    read = [read_as_transformers(folder) for folder in folders if folder is not None]
    known = [config for config in read if config is not None]
    pair = known if len(known) == 2 else [_with_newer_keys(config) for config in raw]
    own, theirs, part = _make_comparable(*pair)
    return _list_differences(own, theirs, part)


def _find_folder(checkpoint: Checkpoint) -> Path | None:
    """The folder with a checkpoint's configuration; for an adapter, its model's folder."""
    adapter = find_adapter(checkpoint)
    return adapter.base.folder if adapter is not None else checkpoint.folder


def _open_clip_config(folder: Path) -> dict[str, Any]:
    content = read_object(folder / OPEN_CLIP.config)
    try:
        return {key: value for key, value in content["model_cfg"].items() if value is not False}
    except (KeyError, TypeError, AttributeError):
        return {}


def read_as_transformers(folder: Path) -> dict[str, Any] | None:
    """A configuration with its defaults and the newest names of keys. None if transformers lacks the class."""
    import transformers

    try:
        with silence_transformers():
            config: dict[str, Any] = transformers.AutoConfig.from_pretrained(folder).to_dict()
    except Exception:  # a configuration from elsewhere can make transformers raise anything
        return None
    return config


def _with_newer_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with rotary positions written as transformers 5 does."""
    newer = {
        key: _with_newer_keys(value) if key in _PARTS and isinstance(value, Mapping) else value
        for key, value in config.items()
    }
    scaling = newer.pop("rope_scaling", None)
    rope = {"rope_theta": newer.pop("rope_theta", None), **(scaling if isinstance(scaling, Mapping) else {})}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    newer.setdefault("rope_parameters", rope)
    return newer


def _make_comparable(
    base: dict[str, Any], expert: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Both configurations and "". If one is of a larger model with a part like the other, that part's
    configuration replaces it, and its key is returned. Of two such parts the one that differs less is taken.
    """
    for whole, single, swap in ((base, expert, False), (expert, base, True)):
        parts = _list_parts(whole)
        if not parts or _list_parts(single):
            continue
        family = str(single.get("model_type"))
        alike = [key for key, part in parts.items() if str(part.get("model_type")).startswith(family)]
        key = min(alike or parts, key=lambda key: len(_list_differences(parts[key], single)))
        return (single, parts[key], key) if swap else (parts[key], single, key)
    return base, expert, ""


def _list_parts(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Configurations of models within a larger one, by their keys."""
    nested = {key: value for key, value in config.items() if isinstance(value, Mapping)}
    return {key: dict(value) for key, value in nested.items() if key in _PARTS or "model_type" in value}


def _list_differences(base: Mapping[str, Any], expert: Mapping[str, Any], part: str = "") -> list[Mismatch]:
    own, theirs = ({k: v for k, v in flatten(config).items() if v != {}} for config in (base, expert))
    mismatches = []
    for key in dict.fromkeys([*own, *theirs]):
        *_, last = path = key.split(".")
        if any(map(_IGNORED.search, path)) or own.get(key) == theirs.get(key):
            continue
        decides: str | None
        if last in {"model_type", "architecture", "_class_name"}:  # of transformers, timm and diffusers
            decides = None if part else "what the model is"
        else:
            decides = next((why for why, (keys, _) in _DECIDING.items() if re.search(keys, key)), None)
        mismatches.append(Mismatch(f"{part}.{key}" if part else key, own.get(key), theirs.get(key), decides))
    return mismatches


def _name_labels(checkpoint: Checkpoint) -> list[str]:
    """The labels in the order of rows; empty if they are unknown, or transformers' placeholders."""
    config = read_config(_find_folder(checkpoint))
    labels = config.get("id2label")
    timm = config.get("label_names") or _read_part(config, "pretrained_cfg").get("label_names")
    if isinstance(timm, list):
        return [str(name).casefold() for name in timm]
    if not isinstance(labels, Mapping) or not all(str(key).isdigit() for key in labels):
        return []
    names = [str(labels[key]).casefold() for key in sorted(labels, key=lambda key: int(key))]
    return [] if all(re.fullmatch(r"label_\d+", name) for name in names) else names


def _read_part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = config.get(key)
    return part if isinstance(part, Mapping) else {}


def _abbreviate(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "…"
