"""Write safetensors files of any size with one tensor in memory.

Names, shapes and dtypes are known before the first value. So the files are planned from them, and each file's
header is written first. Then tensors arrive in any order and from any thread, and go to their place in a file.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import TensorSpec
from mergekit_lab.checkpoints.files import DTYPES
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.ranges import Count, check_value

MAX_SHARD_BYTES = 5_000_000_000
"""The size of a file at which the next one begins, as on the hub."""
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
_MOST_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class Shard:
    """A planned file: its name and its tensors."""

    file: str
    specs: Mapping[str, TensorSpec]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def plan_shards(
    specs: Mapping[str, TensorSpec], max_bytes: int = MAX_SHARD_BYTES, stem: str = "model"
) -> list[Shard]:
    """Files for tensors, in their order: `model.safetensors`, or `model-00001-of-00003.safetensors`, …

    Args:
        specs: the tensors to write; at least one.
        max_bytes: tensor data per file, at least 1; a larger tensor has its own file.
        stem: what the files are called.
    """
    check_value(max_bytes, Count, "max_shard_bytes")
    if not specs:
        raise InputError("there is no tensor to write")
    groups: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if spec.dtype not in _NAME_OF:
            raise InputError(f"tensor {name!r} is {spec.dtype}, which safetensors cannot hold")
        if groups[-1] and filled + spec.nbytes > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = spec
        filled += spec.nbytes
    if len(groups) == 1:
        return [Shard(f"{stem}.safetensors", groups[0])]
    total = len(groups)
    return [Shard(f"{stem}-{n:05}-of-{total:05}.safetensors", group) for n, group in enumerate(groups, 1)]


def plan_files(
    specs: Mapping[str, TensorSpec], max_bytes: int = MAX_SHARD_BYTES, stem: str = "model"
) -> dict[str, int]:
    """The files that a `ShardedWriter` leaves, each with its bytes; see `plan_shards`."""
    shards = plan_shards(specs, max_bytes, stem)
    files = {shard.file: len(_lay_out(shard.specs)[0]) + shard.nbytes for shard in shards}
    if len(shards) > 1:
        files[_name_index(stem)] = len(_format_index(shards).encode())
    return files


def _lay_out(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The header of a file, and the offset of each tensor in it."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):
        spec = specs[name]
        offsets[name] = end
        header[name] = {
            "dtype": _NAME_OF[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end := end + spec.nbytes],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, {n: 8 + len(text) + start for n, start in offsets.items()}


def _name_index(stem: str) -> str:
    return f"{stem}.safetensors.index.json"


def _format_index(shards: Sequence[Shard]) -> str:
    total = sum(shard.nbytes for shard in shards)
    weight_map = {name: shard.file for shard in shards for name in shard.specs}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


class _File:
    """One safetensors file of known content."""

    def __init__(self, path: Path, shard: Shard) -> None:
        head, self._offsets = _lay_out(shard.specs)
        self._path, self._size = path, len(head) + shard.nbytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        os.ftruncate(self._file, self._size)
        self._write_at(memoryview(head), 0)

    def write(self, name: str, tensor: Tensor) -> None:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            self._write_at(flat.view(torch.uint8).numpy().data, self._offsets[name])

    def close(self, sync: bool = True) -> None:
        try:
            if sync:
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def _write_at(self, content: memoryview, offset: int) -> None:
        """Write bytes at an offset. Refuse a file that became shorter than it was made: the system would fill
        the gap with zeros.
        """
        done = 0
        while done < len(content):
            if os.fstat(self._file).st_size != self._size:
                raise InputError(f"{self._path} was cut by another program while it was written")
            done += os.pwrite(self._file, content[done : done + _MOST_AT_ONCE], offset + done)


class ShardedWriter:
    """Safetensors files of one checkpoint in a folder, with their index if there are several.

    `write` may be called from any thread, once for each tensor, in any order; files are flushed to the disk in
    the background as they fill. Leaving the context closes the writer. After an exception the files are
    unfinished.

    Args:
        folder: where the files go; it must exist.
        specs: every tensor that will be written.
        max_bytes, stem: see `plan_shards`.
        sync: wait until what was written is on the disk.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        max_bytes: int = MAX_SHARD_BYTES,
        stem: str = "model",
        sync: bool = True,
    ) -> None:
        self.shards = plan_shards(specs, max_bytes, stem)
        self._folder = folder
        self._specs = specs
        self._stem = stem
        self._sync = sync
        self._shard_of = {name: shard for shard in self.shards for name in shard.specs}
        self._left = {shard.file: len(shard.specs) for shard in self.shards}
        self._pending = set(specs)
        self._open: dict[str, _File] = {}
        self._lock = threading.Lock()
        self._flusher = ThreadPoolExecutor(1, "flush")
        self._flushed: list[Future[None]] = []

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor into its file.

        Raises:
            InputError: it was not announced, was written before, or has another shape or dtype.
        """
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
        with self._lock:
            if self._specs.get(name) != spec:
                raise InputError(f"tensor {name!r} is {spec}; {self._specs.get(name)} was announced")
            if name not in self._pending:
                raise InputError(f"tensor {name!r} is written twice")
            self._pending.discard(name)
            shard = self._shard_of[name]
            if shard.file not in self._open:
                self._open[shard.file] = _File(self._folder / shard.file, shard)
            file = self._open[shard.file]
        file.write(name, tensor)
        with self._lock:
            self._left[shard.file] -= 1
            if not self._left[shard.file]:
                self._flushed.append(self._flusher.submit(self._open.pop(shard.file).close, self._sync))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Wait for the disk, and write the index.

        Raises:
            InputError: tensors that were announced were not written.
        """
        self._flusher.shutdown()
        for file in self._open.values():
            file.close(sync=False)
        if kind is not None:
            return
        if self._pending:
            raise InputError(f"{len(self._pending)} tensors were not written ({join_names(self._pending)})")
        for flushed in self._flushed:
            flushed.result()
        if len(self.shards) > 1:
            (self._folder / _name_index(self._stem)).write_text(_format_index(self.shards))


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
