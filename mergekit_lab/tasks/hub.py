"""Data sets of the Hugging Face hub as local folders. Cached files need no network."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from mergekit_lab.checkpoints import explain_unreachable
from mergekit_lab.checkpoints.hub import find_cached_folder
from mergekit_lab.errors import InputError, say_error
from mergekit_lab.tasks.layouts import find_missing_shards, find_part_files, is_shard

log = logging.getLogger(__name__)

_CONVERTED = "refs/convert/parquet"
"""Where the hub keeps its own parquet of repositories that publish something else."""
_LAST = ".gitattributes"
"""In every repository, and taken last: where it is, so are files whose names do not tell how many there are."""


def find_cached_data(repo: str, parts: Sequence[str], subset: str | None) -> Path | None:
    """The cached folder of a data set, if it holds every file of these parts."""
    for revision in (None, _CONVERTED):
        folder = find_cached_folder(repo, revision, "dataset")
        if folder is None:
            continue
        names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        files = [find_part_files(names, part, subset) for part in parts]
        ended = _LAST in names or all(is_shard(name) for part in files for name in part)
        if ended and all(part and not find_missing_shards(part) for part in files):
            return folder
    return None


def download_data(
    repo: str, parts: Sequence[str], subset: str | None, into: Path | None = None, also: Sequence[str] = ()
) -> Path:
    """Download the files of these parts.

    Args:
        also: parts to download if the data set has them.
        into: the target folder; None takes the hub's cache.

    Raises:
        InputError: the hub cannot be reached, or has no such data set or part.
    """
    import huggingface_hub

    cause = explain_unreachable()
    if cause:
        raise InputError(f"the data set {repo} cannot be downloaded: {cause}")
    try:
        for revision in ("main", _CONVERTED):
            known = huggingface_hub.HfApi().list_repo_files(repo, repo_type="dataset", revision=revision)
            by_part = {part: find_part_files(known, part, subset) for part in parts}
            if all(by_part.values()):
                log.info("%s: downloading %d files", repo, sum(map(len, by_part.values())))
                # What a source need not have comes first: cut short, it must not pass for one without it.
                wanted = [find_part_files(known, part, subset) for part in (*also, *parts)]
                for files in (*filter(None, wanted), [_LAST]):
                    folder = huggingface_hub.snapshot_download(
                        repo,
                        repo_type="dataset",
                        revision=revision,
                        allow_patterns=[*files, "README.md"],
                        local_dir=into,
                    )
                return Path(folder)
    except Exception as error:  # the hub's client raises what its HTTP library does
        reason = say_error(error)
        raise InputError(f"the data set {repo} cannot be downloaded: {reason}") from None
    lacking = ", ".join(part for part, files in by_part.items() if not files)
    raise InputError(f"the data set {repo} has no parquet or tar files of {lacking}")
