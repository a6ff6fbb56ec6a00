"""Checkpoints in files: safetensors, torch's pickles, and indexes over several of either.

Headers are read when a file is opened, tensor data when a tensor is asked for. Files are not trusted: pickles
are opened only with `weights_only=True`, and an index may name only files below its own folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import Checkpoint, InMemory, TensorSpec
from mergekit_lab.checkpoints.plain_files import check_file, read_json
from mergekit_lab.checkpoints.tied_weights import find_configured_ties
from mergekit_lab.errors import InputError, join_names, name_in_errors, say_error

log = logging.getLogger(__name__)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
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
_INDEX = re.compile(r".+\.(?P<kind>safetensors|bin)\.index(\.[\w-]+)?\.json")
_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
"""Where trainers put a model's weights: Lightning and many others, plain torch, timm, DeepSpeed."""


_QUANTIZATION = "_quantization_metadata"
"""Where ComfyUI says in a header how layers are quantized, whatever their tensors are called."""


def is_index(file: Path) -> bool:
    """Whether a file is named as an index, or as a variant's, such as `model.safetensors.index.fp16.json`."""
    return _INDEX.fullmatch(file.name) is not None


def parse_dtype(label: str, name: str, called: str) -> torch.dtype:
    """The dtype that a safetensors header names.

    Raises:
        InputError: it is not read here.
    """
    if called in DTYPES:
        return DTYPES[called]
    if called.startswith(("F4", "F6")):
        raise InputError(
            f"{label} is quantized: {name!r} is stored as {called}, which needs its scales: dequantize it "
            "first, or give the original weights"
        )
    raise InputError(f"{label}: tensor {name!r} has the unsupported dtype {called}")


class Safetensors(Checkpoint):
    """One safetensors file, or several under an index.

    Like transformers, it reads every tensor of every file that an index names; of a name that two files hold
    the last file's counts.

    Raises:
        InputError: a file that is missing, damaged or holds an unknown dtype; an index that does not fit.
    """

    def __init__(self, label: str, files: Sequence[Path], folder: Path | None = None) -> None:
        with name_in_errors(label):
            self._handles = {file: _open_safetensors(file) for file in files}
        self._file_of: dict[str, Path] = {}
        specs: dict[str, TensorSpec] = {}
        for file, handle in self._handles.items():
            if _QUANTIZATION in (handle.metadata() or {}):
                raise InputError(
                    f"{label} is quantized, as {file.name} says under {_QUANTIZATION!r} (ComfyUI): give the "
                    "original weights"
                )
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                view = handle.get_slice(name)
                dtype = parse_dtype(label, name, view.get_dtype())
                specs[name] = TensorSpec(tuple(view.get_shape()), dtype)
                self._file_of[name] = file
        super().__init__(label, specs, files, folder)

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[self._file_of[name]].get_tensor(name)

    def find_ties(self) -> dict[str, str]:
        return self._tied

    @cached_property
    def _tied(self) -> dict[str, str]:
        """Ties by `config.json`. Files do not record them, so the values of the two tensors are compared."""
        return find_configured_ties(self)


def _open_safetensors(file: Path) -> Any:
    check_file(file)
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file} is not a readable safetensors file ({error}): was the copy cut short?"
        ) from None


class Pickled(InMemory):
    """Torch files, mapped into memory if possible."""

    def __init__(self, label: str, files: Sequence[Path], folder: Path | None = None) -> None:
        with name_in_errors(label):
            tensors = {name: value for file in files for name, value in load_pickled(file).items()}
        super().__init__(label, tensors, files, folder)

    def find_ties(self) -> dict[str, str]:
        return {**super().find_ties(), **find_configured_ties(self)}


def load_pickled(file: Path) -> dict[str, Any]:
    """The state dict in a torch file, or in the container that a trainer put it into.

    Raises:
        InputError: the file is missing or cut, holds more than plain tensors, or several models.
    """
    check_file(file)
    try:
        return _find_state_dict(file, _load(file))
    except pickle.UnpicklingError as error:
        with contextlib.suppress(pickle.UnpicklingError):
            return _find_state_dict(file, _load_around_foreign_classes(file))
        other = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it holds a {other[1]}" if other else say_error(error)
        raise InputError(
            f"{file} holds more than plain tensors and is not opened, because unpickling it could "
            f"run code ({reason}). Load it where it was made and save `model.state_dict()` instead"
        ) from None
    except InputError:
        raise
    except Exception as error:  # a damaged or hostile pickle can make the unpickler raise anything
        if "TorchScript" in str(error):
            raise InputError(
                f"{file} is a TorchScript archive, a program: load it with `torch.jit.load` where it "
                "was made and save its `state_dict()` instead"
            ) from None
        reason = say_error(error)
        raise InputError(f"{file} cannot be read ({reason}): was the copy cut short?") from None


def _load(file: Path) -> Any:
    """The content of a torch file, mapped into memory if its records are stored uncompressed."""
    mapped = _can_be_mapped(file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*TorchScript", UserWarning)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _can_be_mapped(file: Path) -> bool:
    """Whether every tensor of a torch file has a record of its own length that is not compressed.

    torch maps a record without a look at either. Archives that another program packed again are compressed.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            records = {entry.filename: entry.file_size for entry in entries}
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if not stored or len(records) < len(entries) or min(entry.header_offset for entry in entries):
                return False
            (pickled,) = [name for name in records if name.endswith("/data.pkl")]
            with archive.open(pickled) as opened:
                sizes = _StorageSizes(opened)
                sizes.load()
    except Exception:  # whatever is wrong, reading the file says it
        return False
    folder = pickled.removesuffix(".pkl")
    return all(records.get(f"{folder}/{key}") == size for key, size in sizes.by_key.items())


class _Inert:
    """Stands for an object whose class is not imported. It accepts what a pickle says, and does nothing."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


_STORED = {
    **{"Untyped": 1, "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2},
    **{"Int": 4, "Float": 4, "Long": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16},
}
"""Bytes of an entry, by what torch's pickles call a storage."""


class _StorageSizes(pickle.Unpickler):
    """The size in bytes of every storage that a torch pickle names. None of its classes is imported."""

    def __init__(self, opened: IO[bytes]) -> None:
        super().__init__(opened)
        self.by_key: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> type[_Inert]:
        return type(name, (_Inert,), {})

    def persistent_load(self, pid: Any) -> _Inert:
        _, storage, key, _, count = pid
        self.by_key[key] = count * _STORED[storage.__name__.removesuffix("Storage")]
        return _Inert()


_PLAIN = (type(None), bool, int, float, str, bytes)


def _load_around_foreign_classes(file: Path) -> Any:
    """The content of a torch file, with inert objects in place of settings, paths and others but tensors.

    Their classes are not imported and nothing of them is called.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        if any(name.startswith(("builtins.", "__builtin__.")) for name in names):
            raise pickle.UnpicklingError("it calls functions of Python itself")
        with torch.serialization.safe_globals([(_Inert, name) for name in names]):
            content = _load(file)
    except Exception as error:  # of a file in torch's older formats, or a damaged one
        raise pickle.UnpicklingError(str(error)) from None
    if isinstance(content, _Inert):
        raise pickle.UnpicklingError("it holds nothing else")
    log.info("%s holds objects that are not read (%s)", file, join_names(names))
    return content


def _find_state_dict(file: Path, content: Any) -> dict[str, Any]:
    """The tensors of a state dict, which may be inside a trainer's container. Plain values are left out."""
    if not isinstance(content, Mapping):
        raise InputError(f"{file} holds a {type(content).__name__}, not a state dict")
    inner = {key: value for key, value in content.items() if isinstance(value, Mapping)}
    models = {key: value for key, value in inner.items() if _holds_tensors(value)}
    known = next((key for key in _CONTAINERS if key in models), None)
    twins: list[Any] = []
    if known is not None:
        content = models[known]
        twins = [key for key, value in models.items() if value.keys() == content.keys()]
    elif not _holds_tensors(content):
        inside = models or {key: inner[key] for key in _CONTAINERS if key in inner}
        if len(inside) == 1:
            return _find_state_dict(file, *inside.values())
        twins = list(models)
    if len(twins) > 1:
        names = join_names(map(str, twins))
        raise InputError(f"{file} holds several models ({names}): save the one that you mean")
    plain = [name for name, value in content.items() if _is_no_weight(name, value)]
    if plain:
        named = join_names(map(str, plain))
        log.info("%s holds values that are not tensors and are not merged (%s)", file, named)
    return {name: value for name, value in content.items() if name not in plain}


def _is_no_weight(name: Any, value: Any) -> bool:
    """Whether an entry of a state dict can be left out: a plain value, or what Transformer Engine adds."""
    return isinstance(value, _PLAIN) or (isinstance(value, _Inert) and str(name).endswith("_extra_state"))


def _holds_tensors(content: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in content.values())


def read_index(index: Path) -> dict[str, Path]:
    """The file of each tensor that `*.safetensors.index.json` or `*.bin.index.json` names.

    Raises:
        InputError: it is no index, or names files outside its folder or of another kind.
    """
    named = _INDEX.fullmatch(index.name)
    kind = f".{named['kind']}" if named else ""
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{index} is not a {kind[1:]} index: it has no weight_map")
    files = {name: PurePosixPath(file) for name, file in weight_map.items()}
    outside = {str(f) for f in files.values() if f.is_absolute() or ".." in f.parts or not f.name}
    if outside:
        raise InputError(f"{index} names files outside its folder ({join_names(outside)}): refused")
    others = {str(file) for file in files.values() if file.suffix != kind}
    if others:
        raise InputError(f"{index} names files that are not {kind} ({join_names(others)}): refused")
    return {name: index.parent / file for name, file in files.items()}


def open_index(label: str, index: Path) -> Checkpoint:
    """Open the checkpoint that an index describes. `read_index` says what is refused."""
    with name_in_errors(label):
        file_of = read_index(index)
        files = sorted(set(file_of.values()))
        absent = [ascii(file.name) for file in files if not os.path.lexists(file)]
        if absent:
            raise InputError(
                f"its index names {len(absent)} of {len(files)} files that are not in {files[0].parent} "
                f"({join_names(absent)}), so it is incomplete: was the download interrupted?"
            )
    opened = Safetensors if ".safetensors.index" in index.name else Pickled
    checkpoint = opened(label, files, index.parent)
    if missing := file_of.keys() - checkpoint.keys():
        raise InputError(f"{label}: its index names tensors its files lack ({join_names(missing)})")
    return checkpoint
