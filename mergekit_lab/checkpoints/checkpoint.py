"""What a checkpoint is to everything that reads one: a mapping from name to tensor, lazy and read-only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mergekit_lab.errors import InputError, join_names


class TensorSpec(NamedTuple):
    """A tensor's shape and dtype, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Entry(NamedTuple):
    """A tensor that is not read yet."""

    spec: TensorSpec
    read: Callable[[], Tensor]


class Checkpoint(Mapping[str, Tensor]):
    """Named tensors, read one at a time.

    Attributes:
        label: what messages call this checkpoint (an expert's name, a path).
        specs: shape and dtype of every tensor, in file order.
        files: the files whose bytes hold the tensors; empty for tensors in memory.
        folder: where `config.json` and the tokenizer's files are, if anywhere.
        changed: keys of `config.json` that need other values for these tensors.
        untied: names of weights that `config.json` ties and these tensors do not, each with the one it was tied
            to.
    """

    changed: Mapping[str, Any] = MappingProxyType({})
    untied: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, label: str, specs: dict[str, TensorSpec], files: Iterable[Path] = (), folder: Path | None = None
    ) -> None:
        odd = [name for name in specs if not name.isprintable()]
        if odd:
            raise InputError(f"{label} has names that cannot be printed ({join_names(map(ascii, odd))})")
        self.label = label
        self.specs = specs
        self.files = tuple(files)
        self.folder = folder

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __getitem__(self, name: str) -> Tensor:
        raise NotImplementedError

    def find_ties(self) -> dict[str, str]:
        """Second names of weights with two names, each with the name that is kept."""
        return {}

    def list_entries(self, names: Mapping[str, str] | None = None) -> dict[str, Entry]:
        """Entries from which another checkpoint is made: all, or those of `names`, a mapping from new names."""
        own = names if names is not None else {name: name for name in self}
        return {new: Entry(self.specs[n], partial(self.__getitem__, n)) for new, n in own.items()}


class InMemory(Checkpoint):
    """A state dict. Names whose tensors share memory are tied.

    Raises:
        InputError: an entry is not a tensor with a name, or one that is not dense.
    """

    def __init__(
        self, label: str, tensors: Mapping[str, Tensor], files: Iterable[Path] = (), folder: Path | None = None
    ) -> None:
        unnamed = [name for name in tensors if not isinstance(name, str)]
        if unnamed:
            raise InputError(f"{label} has names that are not text ({join_names(map(repr, unnamed))})")
        strangers = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
        if strangers:
            raise InputError(
                f"{label} holds entries that are not tensors ({join_names(map(str, strangers))}): "
                "pass the state dict itself, as `model.state_dict()` gives it"
            )
        odd = [name for name, value in tensors.items() if value.layout != torch.strided or value.is_quantized]
        if odd:
            raise InputError(f"{label} holds sparse or quantized tensors ({join_names(odd)}): save them dense")
        specs = {n: TensorSpec(t.shape, t.dtype) for n, t in tensors.items()}
        super().__init__(label, specs, files, folder)
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.is_meta:
            raise InputError(f"{self.label}: {name} is on the device meta, so it has no values")
        return tensor.detach() if tensor.requires_grad else tensor

    def find_ties(self) -> dict[str, str]:
        first: dict[tuple[Any, ...], str] = {}
        again: dict[str, str] = {}
        for name, tensor in self._tensors.items():
            if tensor.numel() == 0 or tensor.device.type == "meta":
                continue
            memory = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if (kept := first.setdefault(memory, name)) != name:
                again[name] = kept
        return again


class Computed(Checkpoint):
    """A checkpoint whose tensors are computed when they are asked for.

    Each thread keeps its last tensor, because a reader of blocks asks for the same tensor once per block.
    """

    @cached_property
    def _last(self) -> threading.local:
        return threading.local()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.specs:
            raise KeyError(name)
        last = self._last
        if getattr(last, "name", None) != name:
            last.name = last.tensor = None
            last.tensor = self.compute(name)
            last.name = name
        tensor: Tensor = last.tensor
        return tensor

    def compute(self, name: str) -> Tensor:
        """The tensor of a name in `specs`."""
        raise NotImplementedError


class Composed(Computed):
    """Tensors of one checkpoint or several, with the folder and configuration of the first.

    Args:
        origin: the first.
        entries: every tensor, in order.
        tied: see `Checkpoint.find_ties`; None takes the origin's, as far as its names are here.
    """

    def __init__(
        self, origin: Checkpoint, entries: Mapping[str, Entry], tied: Mapping[str, str] | None = None
    ) -> None:
        specs = {name: entry.spec for name, entry in entries.items()}
        super().__init__(origin.label, specs, origin.files, origin.folder)
        self.origin = origin
        self.changed, self.untied = origin.changed, origin.untied
        self._entries = entries
        self._tied = tied

    def compute(self, name: str) -> Tensor:
        return self._entries[name].read()

    def find_ties(self) -> dict[str, str]:
        pairs = self.origin.find_ties() if self._tied is None else self._tied
        return {name: kept for name, kept in pairs.items() if name in self.specs and kept in self.specs}


class View(Composed):
    """The same model with some tensors renamed, replaced or left out."""
