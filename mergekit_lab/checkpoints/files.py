"""Checkpoints in files: safetensors, torch's pickles, and indexes over several of either.

Headers are read when a file is opened, tensor data when a tensor is asked for. Nothing is trusted: pickles
are opened with `weights_only=True` only, an index may name files of its own folder only.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import Checkpoint, InMemory, TensorSpec
from mergekit_lab.checkpoints.tied_weights import equal_ties
from mergekit_lab.errors import InputError, listing

DTYPES = {
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
"""What a safetensors header calls a dtype."""

PICKLED = {".pt", ".pth", ".bin", ".ckpt"}


class Safetensors(Checkpoint):
    """One safetensors file, or several under an index.

    Raises:
        InputError: a file that is missing, damaged or holds an unknown dtype; an index that does not fit.
    """

    def __init__(self, label: str, file_of: dict[str, Path] | Path, folder: Path | None = None) -> None:
        files = sorted({file_of} if isinstance(file_of, Path) else set(file_of.values()))
        self._handles = {file: _open_safetensors(label, file) for file in files}
        self._file_of: dict[str, Path] = {}
        self._tied: dict[str, str] | None = None
        specs: dict[str, TensorSpec] = {}
        for file, handle in self._handles.items():
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                if not isinstance(file_of, Path) and file_of.get(name) != file:
                    continue
                view = handle.get_slice(name)
                if view.get_dtype() not in DTYPES:
                    raise InputError(f"{label}: tensor {name!r} has the unsupported dtype {view.get_dtype()}")
                specs[name] = TensorSpec(tuple(view.get_shape()), DTYPES[view.get_dtype()])
                self._file_of[name] = file
        if not isinstance(file_of, Path):
            missing = file_of.keys() - specs.keys()
            if missing:
                raise InputError(f"{label}: its index names tensors its files lack ({listing(missing)})")
        super().__init__(label, specs, files, folder)

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[self._file_of[name]].get_tensor(name)

    def tied(self) -> dict[str, str]:
        """Files cannot say it: the vocabulary's tensors are compared, if `config.json` ties them."""
        if self._tied is None:
            self._tied = equal_ties(self)
        return self._tied


def _open_safetensors(label: str, file: Path) -> Any:
    _refuse_streams(label, file)
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise InputError(f"{label}: the file {file} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{label}: {file} is not a readable safetensors file ({error}): was the copy cut short?"
        ) from None


class Pickled(InMemory):
    """Torch files whose storages are mapped, not read; several of them under an index."""

    def __init__(self, label: str, file_of: dict[str, Path] | Path, folder: Path | None = None) -> None:
        if isinstance(file_of, Path):
            super().__init__(label, load_pickled(label, file_of), [file_of], folder)
            return
        shards = {file: load_pickled(label, file) for file in sorted(set(file_of.values()))}
        missing = [name for name, file in file_of.items() if name not in shards[file]]
        if missing:
            raise InputError(f"{label}: its index names tensors its files lack ({listing(missing)})")
        super().__init__(label, {n: shards[f][n] for n, f in file_of.items()}, shards, folder)

    def tied(self) -> dict[str, str]:
        return {**super().tied(), **equal_ties(self)}


def load_pickled(label: str, file: Path) -> Mapping[str, Any]:
    """The state dict in a torch file; a Lightning checkpoint's `state_dict`.

    Raises:
        InputError: the file is missing or cut, or holds more than plain tensors.
    """
    _refuse_streams(label, file)
    try:
        with file.open("rb") as opened:
            zipped = opened.read(2) == b"PK"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*TorchScript", UserWarning)
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except FileNotFoundError:
        raise InputError(f"{label}: the file {file} does not exist") from None
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f"{label}: {file} holds more than plain tensors and is not opened, because unpickling it could "
            f"run code ({reason}). Load it where it was made and save `model.state_dict()` instead"
        ) from None
    except RuntimeError as error:
        if "TorchScript" not in str(error):
            raise _unreadable(label, file, error) from None
        raise InputError(
            f"{label}: {file} is a TorchScript archive, a program: load it with `torch.jit.load` where it was "
            "made and save its `state_dict()` instead"
        ) from None
    except Exception as error:  # a damaged or hostile pickle can make the unpickler raise anything
        raise _unreadable(label, file, error) from None
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise InputError(f"{label}: {file} holds a {type(content).__name__}, not a state dict")
    return content


def _refuse_streams(label: str, file: Path) -> None:
    """Refuse a pipe or a device, which would be waited for without end."""
    if file.exists() and not file.is_file() and not file.is_dir():
        raise InputError(f"{label}: {file} is a pipe or a device, not a file")


def _unreadable(label: str, file: Path, error: Exception) -> InputError:
    reason = str(error).split("\n")[0] or type(error).__name__
    return InputError(f"{label}: {file} cannot be read ({reason}): was the copy cut short?")


def open_index(label: str, index: Path) -> Checkpoint:
    """The checkpoint that `*.safetensors.index.json` or `*.bin.index.json` describes.

    Raises:
        InputError: it is no index, or names files outside its folder.
    """
    _refuse_streams(label, index)
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{label}: {index} is not a safetensors index ({error!r})") from None
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    outside = {file for file in files.values() if Path(file).name != file or file in {".", ".."}}
    if outside:
        raise InputError(f"{label}: {index} names files outside its folder ({listing(outside)}): refused")
    others = {file for file in files.values() if not file.endswith(suffix)}
    if others:
        raise InputError(f"{label}: {index} names files that are not {suffix} ({listing(others)}): refused")
    file_of = {name: index.parent / file for name, file in files.items()}
    opened = Safetensors if suffix == ".safetensors" else Pickled
    return opened(label, file_of, index.parent)
