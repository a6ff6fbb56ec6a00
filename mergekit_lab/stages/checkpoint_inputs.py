"""The inputs of a merge of checkpoints: opened, named, aligned, given one vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch

from mergekit_lab.checkpoints import (
    MAX_SHARD_BYTES,
    Checkpoint,
    TensorSpec,
    align,
    computed_buffers,
    find_source,
    open_checkpoint,
    reconcile,
    written_specs,
)
from mergekit_lab.errors import InputError, listing, suggestion
from mergekit_lab.merging import Method
from mergekit_lab.merging.inputs import Source, Sources

Devices = str | Sequence[str]
_DTYPES = {"float32", "float64", "float16", "bfloat16"}


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter on a model of its own, not on the base of the merge."""

    model: Source
    adapter: str | Path


@dataclass(frozen=True)
class Prepared:
    """Opened and reconciled inputs, and what shall become of them.

    Attributes:
        base, experts: under one set of names, with one vocabulary.
        side: side inputs by kind and expert.
        include, exclude: name patterns, as they were given.
        kept: names that stay the base's for other reasons: buffers that are computed, `embeddings=base`.
        vocabulary: rows of the embedding, where they are not the base's.
        tokenizer: the folder that the tokenizer comes from.
        origin, opened: the same as they were opened, before their vocabularies were made one.
        base_source, sources: what the card calls each input.
        notes: what was done to the inputs.
    """

    base: Checkpoint
    experts: Mapping[str, Checkpoint]
    origin: Checkpoint
    opened: Mapping[str, Checkpoint]
    side: Mapping[str, Mapping[str, Checkpoint]]
    method: Method
    device: Devices
    dtype: torch.dtype | None
    include: Sequence[str] | None
    exclude: Sequence[str]
    kept: Sequence[str]
    embeddings: str | None
    max_shard_bytes: int
    vocabulary: int | None
    tokenizer: Path | None
    base_source: str
    sources: Mapping[str, str]
    notes: Sequence[str]

    @property
    def single(self) -> bool:
        """open_clip reads one file, whatever its size."""
        return self.base.folder is not None and (self.base.folder / "open_clip_config.json").is_file()

    @property
    def is_hf(self) -> bool:
        return self.base.folder is not None and (self.base.folder / "config.json").is_file()

    @property
    def left_out(self) -> list[str]:
        """Patterns of everything that is not merged."""
        return [*self.exclude, *(escape(name) for name in self.kept)]

    def plan(self, left_out: Sequence[str]) -> tuple[dict[str, TensorSpec], int, str]:
        """What is written, how much to a file, and what the files are called."""
        specs = written_specs(self.base, self.dtype, left_out if self.is_hf else ())
        total = max(1, sum(spec.nbytes for spec in specs.values()))
        return (
            specs,
            total if self.single else self.max_shard_bytes,
            "open_clip_model" if self.single else "model",
        )


def prepare(
    base: Source | Adapter,
    experts: Sources | Mapping[str, Source | Adapter],
    method: Method | Callable[[Checkpoint], Method],
    *,
    statistics: Mapping[str, Sources] | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    dtype: str | torch.dtype | None = None,
    device: Devices = "auto",
    embeddings: str | None = None,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    read: bool = True,
) -> Prepared:
    """Open everything and bring it under the base's names and one vocabulary; see `merge` for the arguments.

    Args:
        read: compare the values of names that look tied; False reads headers only.
    """
    origin = _open("the base", base, None, read)
    named = name_sources(experts, "experts")
    if not named:
        raise InputError("there is nothing to merge: give experts=[…]")
    notes: list[str] = []
    opened = {
        n: align(origin, _open(n, s, origin, read), read=read, say=notes.append) for n, s in named.items()
    }
    tokenizer = _tokenizer_folder(tokenizer_from, origin, opened)
    same = reconcile(origin, list(opened.values()), embeddings, tokenizer)
    side: dict[str, dict[str, Checkpoint]] = {}
    for kind, given in (statistics or {}).items():
        by_name = name_sources(given, kind, tuple(named))
        side[kind] = {
            name: same.side(
                position, open_checkpoint(by_name[name], f"{kind} of {name}", headers_only=not read)
            )
            for position, name in enumerate(named)
        }
    return Prepared(
        base=same.base,
        experts=dict(zip(named, same.experts, strict=True)),
        origin=origin,
        opened=opened,
        side=side,
        method=method if isinstance(method, Method) else method(same.base),
        device=_device(device),
        dtype=read_dtype(dtype),
        include=include,
        exclude=exclude,
        kept=[*same.exclude, *_floating(origin, computed_buffers(origin))],
        embeddings=embeddings,
        max_shard_bytes=max_shard_bytes,
        vocabulary=same.rows,
        tokenizer=tokenizer or same.tokenizer or origin.folder,
        base_source=_called(base),
        sources={name: _called(source) for name, source in named.items()},
        notes=[*notes, *same.notes],
    )


def _floating(checkpoint: Checkpoint, names: Sequence[str]) -> list[str]:
    return [name for name in names if checkpoint.specs[name].dtype.is_floating_point]


def name_sources(sources: Any, what: str, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Inputs by name: a mapping's own names, `names` in order, or the names of the folders, if they differ.

    Raises:
        InputError: the wrong number of them, or names that are no expert's.
    """
    if isinstance(sources, Mapping):
        named = {str(name): source for name, source in sources.items()}
        if names is not None and named.keys() != set(names):
            raise InputError(
                f"the {what} inputs are for ({listing(named)}), the experts are ({listing(names)})"
            )
        return named
    listed = list(sources)
    if names is not None:
        if len(listed) != len(names):
            raise InputError(f"{len(listed)} {what} inputs were given for {len(names)} experts")
        return dict(zip(names, listed, strict=True))
    called = [Path(s).name if isinstance(s, str | Path) else "" for s in listed]
    unique = len(set(called)) == len(called) and all(called)
    return {called[n] if unique else str(n): source for n, source in enumerate(listed)}


def _open(name: str, source: Source | Adapter, base: Checkpoint | None, read: bool) -> Checkpoint:
    if not isinstance(source, Adapter):
        return open_checkpoint(source, name, base=base, headers_only=not read)
    model = open_checkpoint(source.model, f"the base of {name}", headers_only=not read)
    folded = open_checkpoint(source.adapter, name, base=model, headers_only=not read)
    if base is None:
        folded.folder = model.folder
    return folded


def _tokenizer_folder(
    wanted: str | Path | None, base: Checkpoint, experts: Mapping[str, Checkpoint]
) -> Path | None:
    if wanted is None:
        return None
    known = {**experts, "base": base}
    folder = known[str(wanted)].folder if str(wanted) in known else find_source(wanted, weights=False)
    if folder is None or not folder.is_dir():
        raise InputError(f"tokenizer_from={wanted} is no folder and no expert{suggestion(str(wanted), known)}")
    return folder


def _device(device: Devices) -> Devices:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device if isinstance(device, str) else list(device)


def read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by its name.

    Raises:
        InputError: no floating-point dtype that a checkpoint is stored in.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise InputError(f"dtype is {dtype!r}{suggestion(dtype, _DTYPES)}")
    found: torch.dtype = getattr(torch, dtype)
    return found


def _called(source: Any) -> str:
    """What a card calls an input: a hub id as it is, a path by its last part."""
    if isinstance(source, Adapter):
        return f"{_called(source.adapter)} on {_called(source.model)}"
    if isinstance(source, str) and not Path(source).expanduser().exists():
        return source
    if isinstance(source, str | Path):
        return Path(source).absolute().name
    return "in memory"
