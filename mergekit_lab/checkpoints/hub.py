"""Hub ids: `org/name` or `org/name@revision`, as the folder of their snapshot.

Folders go there as commits. Cached files are used without a network. `huggingface_hub` is imported when a hub
id is met.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec
from mergekit_lab.checkpoints.files import is_index, parse_dtype, read_index
from mergekit_lab.checkpoints.libraries import OPEN_CLIP, find_weights
from mergekit_lab.errors import InputError, say_error

log = logging.getLogger(__name__)

_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")
_PATTERNS = [
    *("*.json", "*.txt", "*.model", "*.tiktoken", "*.spm", "bpe.codes", "*.jinja", "*.py"),
    *("LICENSE*", "NOTICE*"),
]
_WEIGHTS = ("*.safetensors", "*.bin")
_REPLACED = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "adapter_config.json", "*.index.json")
"""Of an earlier model in a repository: beside a new one's, libraries would read these."""
_SECONDS = 10.0
_PATIENCE = 3.0


def parse_hub_id(source: str) -> tuple[str, str | None] | None:
    """The repository and revision that a string names, if it could be a hub id."""
    parts = _ID.fullmatch(source)
    if not parts or ".." in source:
        return None
    return parts["repo"], parts["revision"]


def get_snapshot(repo: str, revision: str | None, weights: bool = True) -> Path:
    """The local folder of a repository, downloaded unless it is cached.

    Args:
        weights: False is content with configuration and tokenizer.

    Raises:
        InputError: not cached, and the hub cannot be reached or does not have it.
    """
    import huggingface_hub

    cached = find_cached_snapshot(repo, revision, weights)
    if cached is not None:
        return cached
    with _explain_errors(repo, revision):
        known = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=_SECONDS)
        files = [str(sibling.rfilename) for sibling in known.siblings or ()]
        patterns = _PATTERNS
        if weights:
            safe = any(file.endswith(".safetensors") for file in files)
            patterns = [*_PATTERNS, "*.safetensors" if safe else "*.bin"]
        log.info("%s: downloading %s", repo, known.sha)
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns))


def find_cached_snapshot(repo: str, revision: str | None, weights: bool = True) -> Path | None:
    """The folder of a repository in the cache, if all that is wanted is there."""
    cached = find_cached_folder(repo, revision)
    if cached is None or not (_is_complete(cached) if weights else any(cached.rglob("*.json"))):
        return None
    log.info("%s: using the cached snapshot %s", repo, cached.name[:12])
    return cached


def find_cached_folder(repo: str, revision: str | None, kind: str = "model") -> Path | None:
    """What the cache holds of a repository, whole or in part.

    Args:
        kind: "model" or "dataset".
    """
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(repo, repo_type=kind, revision=revision, local_files_only=True)
        )
    except OSError as error:  # newer clients raise where files that were not asked for are not there
        part: str | None = getattr(error, "snapshot_path", None)
        return None if part is None else Path(part)


def explain_unreachable() -> str | None:
    """Why the hub cannot be reached, within seconds: its own client retries for most of a minute."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(constants.ENDPOINT)
    if getproxies():
        try:
            get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
        except Exception as error:  # of the client's HTTP library
            return f"no connection to {address.hostname} through the proxy ({error})"
        return None
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_PATIENCE).close()
    except OSError as error:
        return f"no connection to {address.hostname} ({error})"
    return None


def check_push(repo: str | None) -> None:
    """Refuse a bad repository name, or an upload without a token that may write, before any work.

    Args:
        repo: `org/name`; None: nothing is pushed.

    Raises:
        InputError: no such name; no token, or one that the hub does not know or that only reads; or the hub
            cannot be reached.
    """
    if repo is None:
        return
    named = parse_hub_id(repo)
    if named is None or named[1]:
        raise InputError(f"push_to is {repo!r}; it must be a repository of the hub, org/name")
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise InputError(f"push_to={repo} needs a token of the hub: run `hf auth login`, or set HF_TOKEN")
    if cause := explain_unreachable():
        raise InputError(f"push_to={repo}: the hub cannot be reached ({cause})")
    try:
        role = huggingface_hub.HfApi().whoami()["auth"]["accessToken"]["role"]
    except Exception as error:  # the hub's client raises what its HTTP library does
        # a mirror may not say whose a token is, and is asked by the upload itself
        role = "unknown" if getattr(getattr(error, "response", None), "status_code", None) == 401 else "write"
    if role in ("unknown", "read"):
        why = "the hub does not know the token" if role == "unknown" else "the token only reads"
        raise InputError(f"push_to={repo}: {why}: run `hf auth login` with one that writes, or set HF_TOKEN")


def push_folder(folder: Path, repo: str, private: bool, ignore: Sequence[str] = ()) -> None:
    """Upload a folder to a repository of the hub as a new commit; create the repository if it is missing.

    The token is the hub client's own, of `hf auth login` or `HF_TOKEN`.

    Args:
        folder: a finished model or adapter; it stays as it is.
        repo: `org/name`. The commit removes an earlier model's weights there; other files stay.
        private: whether a new repository is private; an existing one keeps its visibility.
        ignore: files that are not uploaded.

    Raises:
        InputError: the upload failed. The message says how to repeat it.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=folder, delete_patterns=list(_REPLACED), ignore_patterns=list(ignore),
            commit_message=f"Upload {folder.name} with mergekit_lab",
        )  # fmt: skip
        seen = "private" if api.model_info(repo, timeout=_SECONDS).private else "public"
    except Exception as error:  # the hub's client raises what its HTTP library does
        token = huggingface_hub.get_token()
        cause = error.__cause__ or error
        reason = next(iter(str(cause).strip().splitlines()), "")
        reason = reason.replace(token, "…") if token else reason
        patterns = [word for pattern in _REPLACED for word in ("--delete", pattern)]
        patterns += [word for name in ignore for word in ("--exclude", name)]
        again = ["hf", "upload", repo, str(folder), ".", *(["--private"] if private else []), *patterns]
        raise InputError(
            f"{folder} is finished, and its upload to {repo} failed ({type(cause).__name__}: {reason[:300]}): "
            f"repeat it with\n  {shlex.join(again)}"
        ) from None
    log.info("%s is %s/%s (%s)", folder, api.endpoint, repo, seen)


class RemoteHeaders(Checkpoint):
    """The headers of a repository's safetensors, read over the network; the tensors are not there.

    Raises:
        InputError: the hub cannot be reached, or the repository has no safetensors that a library looks for.
    """

    def __init__(self, label: str, repo: str, revision: str | None) -> None:
        import huggingface_hub

        with _explain_errors(repo, revision):
            api = huggingface_hub.HfApi()
            try:
                headers = api.get_safetensors_metadata(repo, revision=revision, timeout=_SECONDS)
                files = list(headers.files_metadata.values())
            except huggingface_hub.errors.NotASafetensorsRepoError:
                files = [_read_open_clip_headers(api, repo, revision)]
        tensors = {n: file.tensors[n] for file in files for n in file.tensors}
        specs = {
            n: TensorSpec(tuple(info.shape), parse_dtype(label, n, info.dtype)) for n, info in tensors.items()
        }
        super().__init__(label, specs, folder=get_snapshot(repo, revision, weights=False))

    def __getitem__(self, name: str) -> Tensor:
        raise InputError(f"{self.label}: only headers were read, {name!r} is still on the hub")


def _read_open_clip_headers(api: Any, repo: str, revision: str | None) -> Any:
    held = {file.rfilename for file in api.model_info(repo, revision=revision, timeout=_SECONDS).siblings or ()}
    for name in OPEN_CLIP.weights:
        if name in held and name.endswith(".safetensors"):
            return api.parse_safetensors_file_metadata(repo, name, revision=revision, timeout=_SECONDS)
    raise InputError(
        f"{repo} has no safetensors headers to read remotely: run `hf download {repo}` first, "
        "or merge it without dry_run"
    )


@contextmanager
def _explain_errors(repo: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the hub's client raises what its HTTP library does
        name = repo + (f"@{revision}" if revision else "")
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in {401, 403, 404}:
            raise InputError(
                f"{name} is neither a local path nor a model that the hub shows you (status {status}): check "
                "the spelling, or log in with `hf auth login` if it is private or gated"
            ) from None
        offline = {os.environ.get(key, "") for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")} - {"", "0"}
        reason = "offline mode is set" if offline else f"{type(error).__name__}: {say_error(error)[:200]}"
        raise InputError(
            f"{name} is neither a local path nor in the hub's cache, and the hub cannot be reached ({reason}): "
            f"give a folder, or run `hf download {name.replace('@', ' --revision ')}` where there is a network"
        ) from None


def _is_complete(folder: Path) -> bool:
    """Whether a cached snapshot has all its weights: others may have fetched its configuration only."""
    known = find_weights(folder)
    if not known:
        adapters = [file.parent for file in folder.glob("*/adapter_config.json")]
        return _holds_weights(folder) or (bool(adapters) and all(map(_holds_weights, adapters)))
    if not is_index(known[0]):
        return True
    try:
        return all(file.is_file() for file in read_index(known[0]).values())
    except InputError:
        return False


def _holds_weights(folder: Path) -> bool:
    return any(file for pattern in _WEIGHTS for file in folder.glob(pattern))
