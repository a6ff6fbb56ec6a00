"""The inputs of a merge of checkpoints: opened, named, aligned, given one vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mergekit_lab.checkpoints import (
    FLOATING,
    LIBRARIES,
    MAX_SHARD_BYTES,
    TRANSFORMERS,
    Checkpoint,
    Library,
    Reconciled,
    TensorSpec,
    align,
    computed_buffers,
    find_library,
    find_other_weights,
    find_parts_with_weights,
    find_source,
    open_checkpoint,
    plan_specs,
    read_tokens,
    reconcile,
    vocabulary_rows,
)
from mergekit_lab.errors import InputError, listing, suggestion
from mergekit_lab.merging import Method
from mergekit_lab.merging.inputs import Source, Sources

Devices = str | Sequence[str]


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
        tokenizer_source: what the card calls that.
        origin, opened: the same as they were opened, before their vocabularies were made one.
        base_source, sources: what the card calls each input.
        notes: what was done to the inputs.
        problems: why they have no vocabulary in common, where only headers were asked for.
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
    tokenizer_source: str
    base_source: str
    sources: Mapping[str, str]
    notes: Sequence[str]
    problems: Sequence[str] = ()

    @property
    def library(self) -> Library | None:
        """What loads the result."""
        return find_library(self.base)

    @property
    def left_out(self) -> list[str]:
        """Patterns of everything that is not merged."""
        return [*self.exclude, *(escape(name) for name in self.kept)]

    def plan(self, left_out: Sequence[str]) -> Plan:
        """What is written; `left_out` are second names of tied weights."""
        return plan_output(self.base, self.dtype, left_out, self.max_shard_bytes)


class Plan(NamedTuple):
    """What is written, how much to a file, and what the files are called."""

    specs: dict[str, TensorSpec]
    max_bytes: int
    stem: str


def plan_output(
    base: Checkpoint, dtype: torch.dtype | None, left_out: Sequence[str], max_shard_bytes: int
) -> Plan:
    """How a model with the base's tensors is written, so that the base's library loads it: transformers without
    second names of tied weights, open_clip in one file."""
    library = find_library(base)
    specs = plan_specs(base, dtype, left_out if library is TRANSFORMERS else ())
    if library is not None and not library.sharded:
        max_shard_bytes = max(1, sum(spec.nbytes for spec in specs.values()))
    return Plan(specs, max_shard_bytes, (library or TRANSFORMERS).stem)


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
        read: compare the values of names that look tied; False reads headers only, and keeps what is wrong with
            the vocabularies for the report.
    """
    if isinstance(method, type) or not (isinstance(method, Method) or callable(method)):
        raise InputError(f"method is {method!r}; it must be an instance of a merging method, as TIES()")
    origin = _open("the base", base, None, read)
    named = name_sources(experts, "experts")
    if not named:
        raise InputError("there is nothing to merge: give experts=[…]")
    notes = _about_folder(origin)
    opened = {
        n: align(origin, _kin(origin, _open(n, s, origin, read)), read=read, say=notes.append)
        for n, s in named.items()
    }
    tokenizer, problems = None, []
    try:
        tokenizer = _tokenizer_folder(tokenizer_from, origin, opened)
        same = reconcile(origin, list(opened.values()), embeddings, tokenizer)
        _check_tokenizer(tokenizer, same.base)
    except InputError as error:
        if read:
            raise
        same, problems = Reconciled(origin, tuple(opened.values())), [str(error)]
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
        tokenizer_source=_tokenizer_source(tokenizer_from, same.tokenizer, opened),
        base_source=_called(base),
        sources={name: _called(source) for name, source in named.items()},
        notes=[*notes, *same.notes],
        problems=problems,
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
    if isinstance(sources, str | Path):
        raise InputError(f"{what} is one path ({sources}): give a list or a mapping")
    listed = list(sources)
    if names is not None:
        if len(listed) != len(names):
            raise InputError(f"{len(listed)} {what} inputs were given for {len(names)} experts")
        return dict(zip(names, listed, strict=True))
    called = [_folder_or_file(s) if isinstance(s, str | Path) else "" for s in listed]
    unique = len(set(called)) == len(called) and all(called)
    return {called[n] if unique else str(n): source for n, source in enumerate(listed)}


def _folder_or_file(source: str | Path) -> str:
    """A path's last part, but for a file whose name is every model's."""
    path = Path(source)
    known = any(path.name in library.weights for library in LIBRARIES)
    return path.absolute().parent.name if known else path.name


def _open(name: str, source: Source | Adapter, base: Checkpoint | None, read: bool) -> Checkpoint:
    if not isinstance(source, Adapter):
        return open_checkpoint(source, name, base=base, headers_only=not read)
    model = open_checkpoint(source.model, f"the base of {name}", headers_only=not read)
    folded = open_checkpoint(source.adapter, name, base=model, headers_only=not read)
    if base is None:
        folded.folder = model.folder
    return folded


def _about_folder(base: Checkpoint) -> list[str]:
    """What of the base's folder is not merged."""
    library, other, notes = find_library(base), find_other_weights(base), []
    if library is not None and other is not None:
        notes.append(f"the base is the model for {library.name}; {other.name} beside it was not read")
    parts = find_parts_with_weights(base.folder) if library is TRANSFORMERS and base.folder else []
    if parts:
        notes.append(f"{listing(parts)}: weights of sentence-transformers beside the model, the base's own")
    return notes


def _kin(base: Checkpoint, expert: Checkpoint) -> Checkpoint:
    """The expert, unless it is for the library whose file of the base was not read."""
    other = find_other_weights(base)
    if other is not None and 2 * len(base.keys() & expert.keys()) < len(expert):
        raise InputError(
            f"expert {expert.label!r} shares few names with the base, and beside what was read of that is "
            f"{other.name}: if the expert is one of those, give base={other}"
        )
    return expert


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


def _tokenizer_source(wanted: str | Path | None, found: Path | None, opened: Mapping[str, Checkpoint]) -> str:
    if wanted is not None:
        return str(wanted) if str(wanted) in {*opened, "base"} else _called(wanted)
    return next((name for name, expert in opened.items() if found and expert.folder == found), "base")


def _check_tokenizer(folder: Path | None, base: Checkpoint) -> None:
    """Refuse a tokenizer with tokens that have no row in the model that comes out."""
    rows = vocabulary_rows(base)
    tokens = read_tokens(folder) if rows else None
    if rows and tokens and max(tokens.values()) >= rows:
        raise InputError(
            f"tokenizer_from={folder}: its tokens reach row {max(tokens.values())}, and the result has {rows} "
            "rows: embeddings=pad makes room for the tokens of models that have them"
        )


def _device(device: Devices) -> Devices:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device if isinstance(device, str) else list(device)


def read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by its name.

    Raises:
        InputError: no floating-point dtype that a checkpoint is stored in.
    """
    if dtype is None:
        return None
    if isinstance(dtype, torch.dtype):
        if not dtype.is_floating_point:
            raise InputError(f"dtype is {dtype}; it must be a floating-point dtype")
        return dtype
    if dtype not in FLOATING:
        raise InputError(f"dtype is {dtype!r}{suggestion(dtype, FLOATING)}")
    found: torch.dtype = getattr(torch, dtype)
    return found


def _called(source: Any) -> str:
    """What a card calls an input: a hub id as it is, a path by its last part."""
    if isinstance(source, Adapter):
        return f"{_called(source.adapter)} on {_called(source.model)}"
    if isinstance(source, str) and not Path(source).expanduser().exists():
        return source
    if isinstance(source, str | Path):
        path = Path(source).absolute()
        folder = _folder_or_file(path)
        return folder if folder == path.name else f"{folder}/{path.name}"
    return "in memory"
