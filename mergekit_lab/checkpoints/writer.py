"""Write named tensors into one file so that a reader sees the whole file or none."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import TensorSpec
from mergekit_lab.checkpoints.shards import ShardedWriter

_CHUNK = 1 << 20


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file by write, fsync and rename.

    Args:
        path: the file; its folder must exist.
        tensors: tensors on any device. Names that share memory are written as copies.
        metadata: strings kept in the file's header.
    """
    stem = f".{uuid.uuid4().hex}.tmp"
    temporary = path.with_name(f"{stem}.safetensors")
    try:
        specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        total = sum(spec.nbytes for spec in specs.values())
        with ShardedWriter(path.parent, specs, max(total, 1), stem, metadata) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """The hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
