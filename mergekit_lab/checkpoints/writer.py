"""Write named tensors so that a reader sees the whole file or none."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

_CHUNK = 1 << 20


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file by write, fsync and rename.

    Args:
        path: the file; its folder must exist.
        tensors: tensors on any device. Names that share memory are written as copies.
        metadata: strings kept in the file's header.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(copies, temporary, metadata=dict(metadata or {}) | {"format": "pt"})
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
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
