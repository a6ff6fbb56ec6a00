"""Write named tensors into one file so that a reader sees the whole file or none."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import TensorSpec
from mergekit_lab.checkpoints.shards import ShardedWriter
from mergekit_lab.digests import hash_bytes


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


def hash_file(path: Path) -> str:
    """The hexadecimal SHA-256 of a file's bytes. One of the hub's cache is not read: its name is its hash."""
    return name if is_hash(name := path.resolve().name) else hash_bytes(path)


def is_hash(name: str) -> bool:
    """Whether a file's name is a SHA-256, as in the hub's cache."""
    return re.fullmatch(r"[0-9a-f]{64}", name) is not None


def hash_folder(root: Path, files: Iterable[Path]) -> str:
    """The SHA-256 of files below a folder, by their names there and their bytes, in this order."""
    lines = [f"{file.relative_to(root)} {hash_file(file)}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
