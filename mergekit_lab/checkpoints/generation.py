"""Settings that belong to a tokenizer besides its files: where generation ends, and the chat template.

A chat expert of a pretrained base ends with another token than the base. A model with its tokenizer and the
base's `generation_config.json` never stops, so generation settings follow the tokenizer's source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergekit_lab.checkpoints.model_files import Files
from mergekit_lab.checkpoints.plain_files import read_object
from mergekit_lab.checkpoints.tied_weights import read_config, set_keys
from mergekit_lab.checkpoints.tokens import read_tokens
from mergekit_lab.errors import join_names

GENERATION_CONFIG = "generation_config.json"
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def follow_tokenizer(source: Path, files: Files) -> dict[str, Path | str]:
    """A model's planned files, with the generation settings that go with the tokenizer of `source`: its
    `generation_config.json`, or its token ids if it has none.
    """
    ids = _read_token_ids(source)
    changed = dict(files)
    if (source / GENERATION_CONFIG).is_file():
        changed[GENERATION_CONFIG] = source / GENERATION_CONFIG
    for name in ("config.json", GENERATION_CONFIG):
        if name not in changed:
            continue
        planned = changed[name]
        content = json.loads(planned) if isinstance(planned, str) else read_object(planned)
        set_keys(content, ids, always=True)
        changed[name] = json.dumps(content, indent=2) + "\n"
    return changed


def describe_tokenizer(
    base: Path | None, experts: Mapping[str, Path | None], source: Path | None, name: str
) -> list[str]:
    """Sentences on where tokenizer, template and generation settings come from, and which experts' are dropped.

    Args:
        source, name: the folder that the result's tokenizer comes from, and what it is called.
    """
    notes = []
    if source is not None and source != base:
        file = (source / GENERATION_CONFIG).is_file()
        template = "its chat template" if _read_template(source) else "no chat template, as it has none"
        settings = f"its {GENERATION_CONFIG}" if file else "its token ids in the base's generation settings"
        notes.append(f"{name}: its tokenizer, with {template} and {settings}; {_describe_ends(source)}")
        if _read_template(base) and not _read_template(source):
            notes.append(
                "warning: the base's chat template is not taken, as it belongs to the base's tokenizer"
            )
    for expert, folder in experts.items():
        if source is None or folder is None or folder in (source, base):
            continue
        ends, own = _read_ends(folder), _read_template(folder)
        other = ["chat template"] if own and own != _read_template(source) else []
        other += ["end tokens"] if ends and ends != _read_ends(source) else []
        token = _end_token(folder)
        other += [f"tokenizer's end token {token!r}"] if token and token != _end_token(source) else []
        if other:
            notes.append(
                f"warning: {join_names(other)} of {expert} differ from the result's and are not taken "
                f"({expert}: {_describe_ends(folder)}; the result: {_describe_ends(source)}): "
                f"tokenizer_from={expert} takes its tokenizer, template and generation settings"
            )
    return notes


def _describe_ends(folder: Path) -> str:
    names = {row: token for token, row in (read_tokens(folder) or {}).items()}
    ends = [f"{names[row]} ({row})" if row in names else str(row) for row in sorted(_read_ends(folder))]
    return f"generation ends with {join_names(ends)}" if ends else "no end token"


def _read_ends(folder: Path) -> set[int]:
    ids = _read_token_ids(folder).get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return {row for row in listed if type(row) is int}


def _end_token(folder: Path) -> str | None:
    """The token with which the tokenizer itself ends a text."""
    token = read_object(folder / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _read_token_ids(folder: Path) -> dict[str, Any]:
    """Special tokens' ids from the generation settings, else the configuration, else the tokenizer."""
    config = read_config(folder)
    parts = [read_object(folder / GENERATION_CONFIG), config, config.get("text_config")]
    known = [part for part in parts if isinstance(part, dict)]
    ids = {key: next((part[key] for part in known if part.get(key) is not None), None) for key in _ENDS}
    if None in ids.values():
        tokens, special = read_tokens(folder) or {}, read_object(folder / "tokenizer_config.json")
        for key in (key for key, value in ids.items() if value is None):
            token = special.get(key.removesuffix("_id"))
            ids[key] = tokens.get(str(token["content"] if isinstance(token, dict) else token))
    return {key: value for key, value in ids.items() if value is not None}


def _read_template(folder: Path | None) -> Any:
    """The chat template, or several with their names, wherever they are kept."""
    if folder is None:
        return None
    files = sorted([*folder.glob("chat_template.jinja"), *folder.glob("additional_chat_templates/*.jinja")])
    texts = {f.name: f.read_text(encoding="utf-8", errors="replace") for f in files if f.is_file()}
    if texts:
        return texts if len(texts) > 1 or "chat_template.jinja" not in texts else texts["chat_template.jinja"]
    kept = (
        read_object(folder / name).get("chat_template")
        for name in ("chat_template.json", "tokenizer_config.json")
    )
    return next((template for template in kept if template), None)
