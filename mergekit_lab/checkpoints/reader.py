"""One read-only view of named tensors, whatever holds them.

A `Checkpoint` is a mapping from tensor name to tensor. Names, shapes and dtypes are known without
reading the data; a tensor is read when it is asked for and not kept. Files are never trusted: `.pt`
files are opened with `weights_only=True` only, an index may name files of its own folder only.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mergekit_lab.errors import InputError, listing

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_INDEX = "model.safetensors.index.json"
_PICKLED = {".pt", ".pth", ".bin", ".ckpt"}


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class Checkpoint(Mapping[str, Tensor]):
    """Named tensors, read one at a time.

    Attributes:
        label: what messages call this checkpoint (an expert's name, a path).
        specs: shape and dtype of every tensor, in file order.
    """

    def __init__(self, label: str, specs: dict[str, TensorSpec]) -> None:
        self.label = label
        self.specs = specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __getitem__(self, name: str) -> Tensor:
        raise NotImplementedError

    def tied(self) -> dict[str, str]:
        """Names that are another name for the same memory, each with the first name of that memory."""
        return {}


class _InMemory(Checkpoint):
    def __init__(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        strangers = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
        if strangers:
            raise InputError(
                f"{label} holds entries that are not tensors ({listing(map(str, strangers))}): "
                "pass the state dict itself, as `model.state_dict()` gives it"
            )
        super().__init__(label, {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in tensors.items()})
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def tied(self) -> dict[str, str]:
        first: dict[tuple[Any, ...], str] = {}
        again: dict[str, str] = {}
        for name, tensor in self._tensors.items():
            if tensor.numel() == 0 or tensor.device.type == "meta":
                continue
            memory = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if memory in first:
                again[name] = first[memory]
            else:
                first[memory] = name
        return again


class _Safetensors(Checkpoint):
    def __init__(self, label: str, file_of: dict[str, Path] | Path) -> None:
        files = {file_of} if isinstance(file_of, Path) else set(file_of.values())
        self._handles = {file: _open_safetensors(label, file) for file in sorted(files)}
        self._file_of: dict[str, Path] = {}
        specs: dict[str, TensorSpec] = {}
        for file, handle in self._handles.items():
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                if not isinstance(file_of, Path) and file_of.get(name) != file:
                    continue
                view = handle.get_slice(name)
                if view.get_dtype() not in _SAFETENSORS_DTYPES:
                    raise InputError(f"{label}: tensor {name!r} has the unsupported dtype {view.get_dtype()}")
                specs[name] = TensorSpec(tuple(view.get_shape()), _SAFETENSORS_DTYPES[view.get_dtype()])
                self._file_of[name] = file
        if not isinstance(file_of, Path):
            missing = file_of.keys() - specs.keys()
            if missing:
                raise InputError(f"{label}: its index names tensors its files lack ({listing(missing)})")
        super().__init__(label, specs)

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[self._file_of[name]].get_tensor(name)


def _open_safetensors(label: str, file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise InputError(f"{label}: the file {file} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{label}: {file} is not a readable safetensors file ({error}): was the copy cut short?"
        ) from None


def _open_index(label: str, index: Path) -> Checkpoint:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{label}: {index} is not a safetensors index ({error!r})") from None
    outside = {file for file in files.values() if Path(file).name != file}
    if outside:
        raise InputError(f"{label}: {index} names files outside its folder ({listing(outside)}): refused")
    return _Safetensors(label, {name: index.parent / file for name, file in files.items()})


def _open_pickled(label: str, file: Path) -> Checkpoint:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise InputError(f"{label}: the file {file} does not exist") from None
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f"{label}: {file} holds more than plain tensors and is not opened, because unpickling it could "
            f"run code ({reason}). Load it where it was made and save `model.state_dict()` instead"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f"{label}: {file} cannot be read ({reason}): was the copy cut short, or saved by a torch older "
            "than 1.6?"
        ) from None
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise InputError(f"{label}: {file} holds a {type(content).__name__}, not a state dict")
    return _InMemory(label, content)


def open_checkpoint(source: Checkpoint | Mapping[str, Tensor] | str | Path, label: str = "") -> Checkpoint:
    """Open named tensors for reading.

    Args:
        source: a state dict; a folder with `model.safetensors`, an index and its shards, or one
            `.safetensors` file; or a file `.safetensors`, `.pt`, `.pth`, `.bin`, `.ckpt` (a Lightning
            checkpoint's `state_dict`). A `Checkpoint` is returned as it is.
        label: what messages call it; the path by default.

    Raises:
        InputError: nothing there, a truncated or unreadable file, or a pickle of more than tensors.
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, Mapping):
        return _InMemory(label or "the state dict", source)
    path = Path(source)
    label = label or str(path)
    if path.is_dir():
        if (path / _INDEX).is_file():
            return _open_index(label, path / _INDEX)
        found = sorted(path.glob("*.safetensors"))
        if (path / "model.safetensors") in found or len(found) == 1:
            return _Safetensors(label, path / "model.safetensors" if len(found) != 1 else found[0])
        raise InputError(
            f"{label}: the folder {path} holds {len(found)} .safetensors files and no {_INDEX}: name one file"
        )
    if path.suffix == ".safetensors":
        return _Safetensors(label, path)
    if path.suffix in _PICKLED:
        return _open_pickled(label, path)
    if not path.exists():
        raise InputError(f"{label}: {path} does not exist")
    raise InputError(
        f"{label}: {path} is no checkpoint that can be read: expected a folder, .safetensors, "
        f"{', '.join(sorted(_PICKLED))}"
    )
