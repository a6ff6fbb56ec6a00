"""Open named tensors, whatever holds them.

A `Checkpoint` is a mapping from tensor name to tensor. Names, shapes and dtypes are known without
reading the data; a tensor is read when it is asked for and not kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mergekit_lab.checkpoints.adapters import ADAPTER_CONFIG, find_adapter_folder, open_adapter
from mergekit_lab.checkpoints.checkpoint import Checkpoint, InMemory
from mergekit_lab.checkpoints.files import PICKLED, Pickled, Safetensors, is_index, open_index, read_index
from mergekit_lab.checkpoints.hub import RemoteHeaders, find_cached_snapshot, get_snapshot, parse_hub_id
from mergekit_lab.checkpoints.libraries import LIBRARIES, TRANSFORMERS, find_other_weights, find_weights
from mergekit_lab.checkpoints.low_rank import RECORD_FILE, LowRank
from mergekit_lab.checkpoints.plain_files import check_file
from mergekit_lab.errors import InputError, join_names, name_in_errors

_NO_MODEL = {"training_args.bin", "optimizer.bin", "scheduler.bin"}


def open_checkpoint(
    source: Checkpoint | Mapping[str, Tensor] | str | Path,
    label: str = "",
    *,
    base: Checkpoint | None = None,
    headers_only: bool = False,
) -> Checkpoint:
    """Open named tensors for reading.

    Args:
        source: a state dict; a folder with safetensors (an index and its shards, or one file) or with
            `pytorch_model.bin` (sharded or not); a file `.safetensors`, `.pt`, `.pth`, `.bin`, `.ckpt` (a
            Lightning checkpoint's `state_dict`), or an index over several; a folder of a PEFT adapter or of
            low-rank factors, folded into `base`; or, as a string, a hub id `org/name` or `org/name@revision`.
            A `Checkpoint` is returned as it is.
        label: its name in messages; the path by default.
        base: what an adapter or low-rank factors are folded into; of a folder that holds a model for
            transformers and for open_clip the one is opened that has the base's names, without a base that for
            transformers. Other sources do not need it.
        headers_only: do not download the tensors of a hub id that is not cached.

    Raises:
        InputError: nothing there, a truncated or unreadable file, a pickle of more than tensors, an adapter
            that cannot be folded, a hub id that is not cached while the hub cannot be reached.
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, Mapping):
        return InMemory(label or "the state dict", source)
    if not isinstance(source, str | Path):
        raise InputError(
            f"{label or 'the source'} is a {type(source).__name__}: give a state dict, a path or a hub id"
        )
    label = label or str(source)
    wanted = _parse_unless_local(source)
    if wanted and headers_only and find_cached_snapshot(*wanted) is None:
        small = find_adapter_folder(get_snapshot(*wanted, weights=False), label)
        if not (small / ADAPTER_CONFIG).is_file():
            return RemoteHeaders(label, *wanted)
    path = find_adapter_folder(find_source(source), label)
    if path.is_dir():
        if (path / ADAPTER_CONFIG).is_file():
            return open_adapter(path, base, label)
        if (path / RECORD_FILE).is_file():
            if base is None:
                raise InputError(f"{label}: {path} holds what a merge adds to its base: expand it on that base")
            return LowRank(path, base, label)
        return _open_folder(label, path, base)
    return _open_file(label, path)


def list_deciding_files(source: str, label: str) -> list[Path]:
    """The files whose bytes decide what a source is, given its base; `open_checkpoint` says what is raised."""
    path = find_adapter_folder(find_source(source), label)
    records = [path / name for name in (ADAPTER_CONFIG, RECORD_FILE) if (path / name).is_file()]
    if not records:
        return list(open_checkpoint(source, label).files)
    return [*records, *sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".bin"))]


def find_source(source: str | Path, weights: bool = True) -> Path:
    """The local path of a source; a hub id that is no path becomes its snapshot's folder.

    Args:
        weights: False is content with a snapshot's configuration and tokenizer.
    """
    wanted = _parse_unless_local(source)
    return get_snapshot(*wanted, weights) if wanted else _to_path(source)


def _parse_unless_local(source: str | Path) -> tuple[str, str | None] | None:
    return parse_hub_id(source) if isinstance(source, str) and not _to_path(source).exists() else None


def _to_path(source: str | Path) -> Path:
    try:
        path = Path(source).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a zero byte, nobody's home
        raise InputError(f"{str(source)[:200]!r} is not a path ({error})") from None
    return path


def _open_folder(label: str, path: Path, base: Checkpoint | None) -> Checkpoint:
    """What a library looks for, of two libraries' files the one with the base's names; else the only file."""
    known = find_weights(path)
    if known:
        best = _open_file(label, known[0], path)
        other = None if base is None else find_other_weights(best)
        if base is not None and other is not None:
            second = _open_file(label, other, path)
            if len(second.keys() & base.keys()) > len(best.keys() & base.keys()):
                return second
        return best
    return _open_lone_file(label, path)


def _open_lone_file(label: str, path: Path) -> Checkpoint:
    """The one file, or the one index with its shards, of a folder in which no library finds its own."""
    visible = [file for file in sorted(path.iterdir()) if not file.name.startswith(".")]
    safe = [file for file in visible if file.suffix == ".safetensors"]
    pickled = [file for file in visible if file.suffix == ".bin" and file.name not in _NO_MODEL]
    kind, files = (".safetensors", safe) if safe or not pickled else (".bin", pickled)
    indexes = [file for file in visible if is_index(file) and f"{kind}.index" in file.name]
    with name_in_errors(label):
        shards = {file for index in indexes for file in read_index(index).values()}
    lone = [*indexes, *(file for file in files if file not in shards)]
    if not lone:
        below = [f.name for f in visible if f.is_dir() and (find_weights(f) or (f / ADAPTER_CONFIG).is_file())]
        hint = f"; there are some below it, in {join_names(below)}" if below else ""
        raise InputError(
            f"{label}: the folder {path} holds no weights that are read here "
            f"({join_names(file.name for file in visible) or 'it is empty'}){hint}"
        )
    if len(lone) != 1:
        parts = any(re.search(r"-\d+-of-\d+$", file.stem) for file in lone)
        way = "their index is missing" if parts else "name one file"
        raise InputError(
            f"{label}: the folder {path} holds {len(files)} {kind} files and no "
            f"{TRANSFORMERS.weights[0]}: {way}"
        )
    return _open_file(label, lone[0], path)


def _open_file(label: str, path: Path, folder: Path | None = None) -> Checkpoint:
    """A file; one that a library looks for belongs with what is beside it."""
    if any(path.name in library.weights for library in LIBRARIES):
        folder = path.parent
    if is_index(path):
        return open_index(label, path)
    if path.suffix == ".safetensors":
        return Safetensors(label, [path], folder)
    if path.suffix in PICKLED:
        return Pickled(label, [path], folder)
    with name_in_errors(label):
        check_file(path)
    if path.suffix == ".gguf":
        raise InputError(
            f"{label}: {path} is a GGUF file: `python -m mergekit_lab.backbones.folder {path} OUT` makes a "
            "folder of it that can be read"
        )
    raise InputError(
        f"{label}: {path} is not a readable checkpoint: expected a folder, .safetensors, "
        f"{', '.join(sorted(PICKLED))}"
    )
