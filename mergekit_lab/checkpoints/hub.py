"""Hub ids: `org/name` or `org/name@revision`, as the folder of their snapshot.

What is cached is used as it is, without a network. `huggingface_hub` is imported when a hub id is met.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

from mergekit_lab.errors import InputError

log = logging.getLogger(__name__)

_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")
_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "LICENSE*", "NOTICE*"]
_WEIGHTS = ("*.safetensors", "*.bin")
_SECONDS = 10.0


def hub_id(source: str) -> tuple[str, str | None] | None:
    """The repository and revision that a string names, if it could be a hub id."""
    found = _ID.fullmatch(source)
    if not found or ".." in source:
        return None
    return found["repo"], found["revision"]


def snapshot(repo: str, revision: str | None) -> Path:
    """The local folder of a repository, downloaded unless it is cached.

    Raises:
        InputError: not cached, and the hub cannot be reached or does not have it.
    """
    import huggingface_hub

    try:
        cached = Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
        if _complete(cached):
            log.info("%s: the cached snapshot %s", repo, cached.name[:12])
            return cached
    except OSError:
        pass
    name = repo + (f"@{revision}" if revision else "")
    try:
        known = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=_SECONDS)
        files = [str(sibling.rfilename) for sibling in known.siblings or ()]
        safe = any(file.endswith(".safetensors") for file in files)
        log.info("%s: downloading %s", name, known.sha)
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=known.sha, allow_patterns=_PATTERNS if safe else [*_PATTERNS, "*.bin"]
            )
        )
    except Exception as error:  # the hub's client raises what its HTTP library does
        raise InputError(_why(name, error)) from None


def _complete(folder: Path) -> bool:
    """Whether a cached snapshot has all its weights: others may have fetched its configuration only."""
    for index in folder.glob("*.index.json"):
        named = set(json.loads(index.read_text()).get("weight_map", {}).values())
        if all((folder / str(file)).is_file() for file in named):
            return True
    return not list(folder.glob("*.index.json")) and any(p for e in _WEIGHTS for p in folder.glob(e))


def _why(name: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in {401, 403, 404}:
        return (
            f"{name} is neither a local path nor a model that the hub shows you (status {status}): check the "
            "spelling, or log in with `hf auth login` if it is private or gated"
        )
    offline = any(
        os.environ.get(key, "") not in {"", "0"} for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    reason = "offline mode is set" if offline else f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return (
        f"{name} is neither a local path nor in the hub's cache, and the hub cannot be reached ({reason}): "
        "give "
        f"a folder, or run `hf download {name.replace('@', ' --revision ')}` where there is a network"
    )
