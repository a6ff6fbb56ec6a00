"""Which row of an embedding is which token's, by the tokenizer's own files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from mergekit_lab.checkpoints.plain_files import check_file, read_json, read_object
from mergekit_lab.errors import InputError, join_names

_MOST_ROWS = 1 << 31
_READ = ("tokenizer.json", "vocab.json", "vocab.txt")
_UNREAD = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "*.tiktoken")


def read_tokens(folder: Path | None) -> dict[str, int] | None:
    """Row of each token, from the tokenizer's files; None if none is readable as text.

    Raises:
        InputError: such a file is damaged, or gives a token an impossible row.
    """
    if folder is None:
        return None
    try:
        tokens = _read_tokens(folder)
        wrong = [token for token, row in (tokens or {}).items() if not 0 <= row < _MOST_ROWS]
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"the tokenizer files of {folder} cannot be read ({error!r})") from None
    if wrong:
        raise InputError(
            f"the tokenizer files of {folder} give tokens impossible rows ({join_names(map(repr, wrong))})"
        )
    return tokens


def digest_other_tokenizer(folder: Path | None) -> bytes | None:
    """A digest of the tokenizer's file where that is none of those that are read here."""
    if folder is None or any((folder / name).is_file() for name in _READ):
        return None
    files = sorted(file for pattern in _UNREAD for file in folder.glob(pattern) if file.is_file())
    return sha256(files[0].read_bytes()).digest() if files else None


def add_tokens(
    folder: Path, models: Iterable[tuple[Path | None, Mapping[str, int]]], named: Iterable[str]
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """What `tokenizer.json` needs so that a tokenizer knows more tokens.

    Args:
        folder: of the tokenizer.
        models: whose tokens, with rows there, and settings it gets: other tokenizers' folders.
        named: further tokens.

    Returns:
        The row of each token, and the new entries of `added_tokens`.

    Raises:
        InputError: a row for a new token cannot be foretold, as there is no `tokenizer.json` or it has gaps.
    """
    file = folder / "tokenizer.json"
    content = read_object(file)
    rows = (read_tokens(folder) or {}) if content else {}
    entries: dict[str, dict[str, Any]] = {}
    for other, tokens in models:
        own = _read_added(other)
        new = [token for token in sorted(tokens, key=lambda token: tokens[token]) if token not in rows]
        for token in (*new, *(token for token in own if token in tokens)):
            entries.setdefault(token, own.get(token, {}))
    for token in named:
        if token not in rows:
            entries.setdefault(token, {})
    for token in _read_added(folder):
        entries.pop(token, None)
    if entries and (not rows or rows != _read_fast_tokens(content) or len(rows) != 1 + max(rows.values())):
        why = "its rows have gaps, or other files know more tokens" if content else "it has no tokenizer.json"
        raise InputError(
            f"the tokenizer of {folder} cannot get new tokens ({join_names(entries)}), as {why}: save it with "
            "transformers"
        )
    for token in entries:
        rows.setdefault(token, len(rows))
    return rows, [_NEW | settings | {"id": rows[t], "content": t} for t, settings in entries.items()]


_NEW = {
    "id": 0, "content": "", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
    "special": False,
}  # fmt: skip
"""An entry of `added_tokens` as the library makes it of a string."""


def _read_added(folder: Path | None) -> dict[str, dict[str, Any]]:
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        return {}
    return {str(entry["content"]): entry for entry in read_json(file).get("added_tokens") or ()}


def _read_tokens(folder: Path) -> dict[str, int] | None:
    settings = read_object(folder / "tokenizer_config.json")
    added = {str(t["content"]): int(row) for row, t in (settings.get("added_tokens_decoder") or {}).items()}
    if (folder / "tokenizer.json").is_file():
        return added | _read_fast_tokens(read_json(folder / "tokenizer.json"))
    tokens = None
    if (folder / "vocab.json").is_file():
        tokens = {str(token): int(row) for token, row in read_json(folder / "vocab.json").items()}
    elif (folder / "vocab.txt").is_file():
        check_file(folder / "vocab.txt")
        with (folder / "vocab.txt").open(encoding="utf-8") as lines:  # str.splitlines() knows other ends
            tokens = {line.removesuffix("\n"): row for row, line in enumerate(lines)}
    if tokens is not None and (folder / "added_tokens.json").is_file():
        tokens |= {str(token): int(row) for token, row in read_json(folder / "added_tokens.json").items()}
    return tokens and tokens | added


def _read_fast_tokens(content: dict[str, Any]) -> dict[str, int]:
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):
        tokens = {str(entry[0]): row for row, entry in enumerate(vocabulary)}
    else:
        tokens = {str(token): int(row) for token, row in vocabulary.items()}
    return tokens | {str(t["content"]): int(t["id"]) for t in content.get("added_tokens") or ()}
