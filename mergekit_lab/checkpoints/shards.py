"""Write safetensors files of any size with one tensor in memory.

Names, shapes and dtypes are known before the first value is: files are planned from them, each file's header is
written first, and a tensor's bytes go to their place when they arrive, in any order and from any thread.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import TensorSpec
from mergekit_lab.checkpoints.files import DTYPES
from mergekit_lab.errors import InputError, listing

MAX_SHARD_BYTES = 5_000_000_000
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
_MOST_AT_ONCE = 1 << 30


@dataclass(frozen=True)
class Shard:
    """One file to be: its name and what it holds."""

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
        specs: what is to be written; at least one tensor.
        max_bytes: of tensor data a file, at least 1; a tensor that is larger has a file of its own.
        stem: what the files are called.
    """
    if not isinstance(max_bytes, int) or max_bytes < 1:
        raise InputError(f"max_shard_bytes is {max_bytes!r}; it must be a whole number of at least 1")
    if not specs:
        raise InputError("there is no tensor to write")
    groups: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if groups[-1] and filled + spec.nbytes > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = spec
        filled += spec.nbytes
    if len(groups) == 1:
        return [Shard(f"{stem}.safetensors", groups[0])]
    total = len(groups)
    return [Shard(f"{stem}-{n:05}-of-{total:05}.safetensors", group) for n, group in enumerate(groups, 1)]


class _File:
    """One safetensors file of known content."""

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        ordered = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._places: dict[str, int] = {}
        end = 0
        for name in ordered:
            spec = specs[name]
            if spec.dtype not in _NAME_OF:
                raise InputError(f"tensor {name!r} is {spec.dtype}, which safetensors cannot hold")
            self._places[name] = end
            offsets = [end, end + spec.nbytes]
            header[name] = {"dtype": _NAME_OF[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
            end += spec.nbytes
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.path = path
        self._data = 8 + len(text)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        os.ftruncate(self._file, self._data + end)
        _write_at(self._file, memoryview(len(text).to_bytes(8, "little") + text), 0)

    def write(self, name: str, tensor: Tensor) -> None:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            _write_at(self._file, flat.view(torch.uint8).numpy().data, self._data + self._places[name])

    def close(self, sync: bool = True) -> None:
        try:
            if sync:
                os.fsync(self._file)
        finally:
            os.close(self._file)


def _write_at(file: int, content: memoryview, place: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done : done + _MOST_AT_ONCE], place + done)


class ShardedWriter:
    """Safetensors files of one checkpoint in a folder, with their index if there are several.

    `write` may be called from any thread, once for each tensor, in any order; files are flushed to the disk in
    the background as they fill. Leaving the context closes the writer; an exception leaves what is there
    unfinished.

    Args:
        folder: where the files go; it must exist.
        specs: every tensor that will be written.
        max_bytes, stem: see `plan_shards`.
        metadata: strings kept in each file's header.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        max_bytes: int = MAX_SHARD_BYTES,
        stem: str = "model",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.shards = plan_shards(specs, max_bytes, stem)
        self._folder = folder
        self._specs = specs
        self._stem = stem
        self._metadata = dict(metadata or {}) | {"format": "pt"}
        self._shard_of = {name: shard for shard in self.shards for name in shard.specs}
        self._left = {shard.file: len(shard.specs) for shard in self.shards}
        self._pending = set(specs)
        self._open: dict[str, _File] = {}
        self._lock = threading.Lock()
        self._flusher = ThreadPoolExecutor(1, "flush")
        self._flushed: list[Future[None]] = []

    def write(self, name: str, tensor: Tensor) -> None:
        """Put one tensor where it belongs.

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
                self._open[shard.file] = _File(self._folder / shard.file, shard.specs, self._metadata)
            file = self._open[shard.file]
        file.write(name, tensor)
        with self._lock:
            self._left[shard.file] -= 1
            if not self._left[shard.file]:
                self._flushed.append(self._flusher.submit(self._open.pop(shard.file).close))

    def close(self) -> None:
        """Wait for the disk, and write the index.

        Raises:
            InputError: tensors that were announced were not written.
        """
        if self._pending:
            raise InputError(f"{len(self._pending)} tensors were not written ({listing(self._pending)})")
        for flushed in self._flushed:
            flushed.result()
        self._flusher.shutdown()
        if len(self.shards) > 1:
            total = sum(shard.nbytes for shard in self.shards)
            weight_map = {name: self._shard_of[name].file for name in sorted(self._specs)}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            path = self._folder / f"{self._stem}.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n")

    def abort(self) -> None:
        """Close all files as they are."""
        self._flusher.shutdown()
        for file in self._open.values():
            file.close(sync=False)
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise
