"""Write named tensors into one file so that a reader sees the whole file or none."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import TensorSpec
from mergekit_lab.checkpoints.shards import ShardedWriter


def write_tensors(path: Path, tensors: Mapping[str, Tensor], sync: bool = True) -> None:
    """Write one safetensors file by write, fsync and rename.

    Args:
        path: the file; its folder must exist.
        tensors: tensors on any device. Names that share memory are written as copies.
        sync: wait for the disk; False if who publishes the folder does.
    """
    stem = f".{uuid.uuid4().hex}.tmp"
    temporary = path.with_name(f"{stem}.safetensors")
    try:
        specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        total = sum(spec.nbytes for spec in specs.values())
        with ShardedWriter(path.parent, specs, max(total, 1), stem, sync=sync) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def hash_file(path: Path, remember: bool = False) -> str:
    """The hexadecimal SHA-256 of a file's bytes.

    Args:
        remember: read it again in this process only if it has changed since, by its size and time of change; a
            file of the hub's cache is not read, for its hash is its name.
    """
    if remember:
        if is_hash(name := path.resolve().name):
            return name
        status = path.stat()
        return _remember(path.absolute(), status.st_ino, status.st_size, status.st_mtime_ns)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_hash(name: str) -> bool:
    """Whether a file's name is a SHA-256, as in the hub's cache."""
    return re.fullmatch(r"[0-9a-f]{64}", name) is not None


def hash_folder(root: Path, files: Iterable[Path]) -> str:
    """The SHA-256 of files below a folder, by their names there and their bytes, in this order."""
    lines = [f"{file.relative_to(root)} {hash_file(file, remember=True)}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@lru_cache(maxsize=256)
def _remember(path: Path, *status: int) -> str:
    return hash_file(path)
