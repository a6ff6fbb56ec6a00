"""Prepare the inputs of a merge of checkpoints: open, name and align them, and give them one vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mergekit_lab.checkpoints import (
    TRANSFORMERS,
    Checkpoint,
    align,
    find_adapter,
    open_checkpoint,
    parse_hub_id,
)
from mergekit_lab.checkpoints.align import list_computed_buffers, untie
from mergekit_lab.checkpoints.casting import FLOATING
from mergekit_lab.checkpoints.generation import describe_tokenizer
from mergekit_lab.checkpoints.kinship import describe_kinship
from mergekit_lab.checkpoints.layers import LayerRange, arrange_layers
from mergekit_lab.checkpoints.libraries import find_library, find_other_weights, find_weights
from mergekit_lab.checkpoints.model_config import compare_configs
from mergekit_lab.checkpoints.model_files import find_parts_with_weights, find_tokenizer_files
from mergekit_lab.checkpoints.processing import describe_processing
from mergekit_lab.checkpoints.reader import find_source
from mergekit_lab.checkpoints.shards import MAX_SHARD_BYTES
from mergekit_lab.checkpoints.tied_weights import read_config
from mergekit_lab.checkpoints.tokens import read_tokens
from mergekit_lab.checkpoints.vocabulary import count_vocabulary_rows, reconcile
from mergekit_lab.checkpoints.vocabulary_rows import Reconciled, TokenPlan
from mergekit_lab.commands.prepared import Adapter, Arranged, Prepared
from mergekit_lab.commands.sources import name_by_folder, refuse_absent, shorten_path
from mergekit_lab.errors import InputError, join_names, suggest
from mergekit_lab.merging import Method, inputs, resolve_device
from mergekit_lab.merging.devices import Devices, parse_devices
from mergekit_lab.merging.inputs import Source, Sources, is_selected
from mergekit_lab.ranges import require, require_choice

_FACTOR = re.compile(
    r"(^|[._])(lora_?(a|b|down|up|embedding_a|embedding_b)|lora\.(down|up)|hada_|lokr_)", re.IGNORECASE
)
"""In names of adapters, of peft, diffusers and kohya-ss."""


def prepare(
    base: Source | Adapter | Arranged,
    experts: Sources | Mapping[str, Source | Adapter | Arranged],
    method: Method | Callable[[Checkpoint], Method],
    *,
    statistics: Mapping[str, Sources] | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    dtype: str | torch.dtype | None = None,
    device: Devices = "auto",
    embeddings: str | None = None,
    tokenizer_from: str | Path | None = None,
    chat_template: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    allow_config_mismatch: Sequence[str] = (),
    buffers: str = "merge",
    tokens: TokenPlan | None = None,
    read: bool = True,
) -> Prepared:
    """Open everything and bring it under the base's names and one vocabulary; see `merge` for the arguments.

    Args:
        tokens: a recipe's rules for vocabularies.
        read: compare the values of names that look tied; False reads headers only, and keeps what is wrong with
            the vocabularies for the report.
    """
    is_method = isinstance(method, Method) or (callable(method) and not isinstance(method, type))
    require(is_method, "method", method, "an instance of a merging method, as TIES()")
    named = name_by_folder(experts, "experts")
    if not named:
        raise InputError("there is nothing to merge: give experts=[…]")
    dtype, devices = read_dtype(dtype), parse_devices(device)
    if read:  # the hub may be slow: what can be judged before it is asked is judged now
        for each in devices:
            resolve_device(each)
        if isinstance(method, Method):
            method.check(tuple(named))
        refuse_absent({"the base": base, **named})
    is_merged = partial(is_selected, include=include, exclude=exclude)
    origin, opened, notes, problems = _Opener(read, allow_config_mismatch).open_all(base, named, is_merged)
    reconciled, wanted = Reconciled(origin, tuple(opened.values())), None
    try:
        wanted = _find_tokenizer_folder(tokenizer_from, origin, opened)
        same = reconcile(origin, list(opened.values()), embeddings, wanted, is_merged, tokens)
        _check_tokenizer(wanted, same.base)
        reconciled = same
    except InputError as error:
        problems.append(str(error))
    if problems and read:
        raise InputError("\n".join(problems))
    side: dict[str, dict[str, Checkpoint]] = {}
    for kind, listed in (statistics or {}).items():
        by_name = inputs.name_sources(listed, kind, tuple(named))
        side[kind] = {
            n: reconciled.side(at, open_checkpoint(by_name[n], f"{kind} of {n}", headers_only=not read))
            for at, n in enumerate(named)
        }
    tokenizer_folder = wanted or reconciled.tokenizer or origin.folder
    tokenizer_source = _name_tokenizer_source(tokenizer_from, reconciled.tokenizer, opened)
    folders = {name: expert.folder for name, expert in opened.items()}
    notes += reconciled.notes
    notes += describe_tokenizer(origin.folder, folders, tokenizer_folder, tokenizer_source)
    notes += describe_processing(origin.folder, folders)
    if read and not isinstance(base, Arranged):
        whole = {name: expert for name, expert in opened.items() if not isinstance(named[name], Arranged)}
        notes += describe_kinship(origin, whole, is_merged)
    notes += _describe_twins(named) if isinstance(method, Method) else []
    return Prepared(
        base=reconciled.base,
        experts=dict(zip(named, reconciled.experts, strict=True)),
        origin=origin,
        opened=opened,
        side=side,
        method=method if isinstance(method, Method) else method(reconciled.base),
        device=devices,
        dtype=dtype,
        include=include,
        exclude=exclude,
        kept=[
            *reconciled.exclude,
            *(n for n in list_computed_buffers(origin) if origin.specs[n].dtype.is_floating_point),
            *inputs.list_kept_statistics(origin, buffers),
        ],
        embeddings=embeddings,
        max_shard_bytes=max_shard_bytes,
        vocabulary=reconciled.rows,
        tokenizer=tokenizer_folder,
        added_tokens=reconciled.added,
        tokenizer_source=tokenizer_source,
        chat_template=chat_template,
        base_source=_name_input(base),
        sources={name: _name_input(source) for name, source in named.items()},
        notes=notes,
        problems=problems,
    )


@dataclass
class _Opener:
    """Opens inputs. Collects notes and problems of their configurations."""

    read: bool
    allowed: Sequence[str]
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def open_all(
        self, base: Source | Adapter | Arranged, experts: Mapping[str, Any], is_merged: Callable[[str], bool]
    ) -> tuple[Checkpoint, dict[str, Checkpoint], list[str], list[str]]:
        """The base, the experts under its names, notes, and problems."""
        origin = self.open("the base", base, None)
        notes = _describe_folder(origin)
        sources = {n: _require_kin(origin, self.open(n, s, origin)) for n, s in experts.items()}
        origin = untie(origin, sources.values(), notes.append)
        say = notes.append
        opened = {n: align(origin, s, read=self.read, say=say, is_merged=is_merged) for n, s in sources.items()}
        of_configs, problems = compare_configs(origin, opened, self.allowed, is_merged)
        return origin, opened, [*notes, *self.notes, *of_configs], [*self.problems, *problems]

    def open(self, name: str, source: Source | Adapter | Arranged, base: Checkpoint | None) -> Checkpoint:
        if isinstance(source, Arranged):
            return self.arrange(name, source)
        if not isinstance(source, Adapter):
            opened = open_checkpoint(source, name, base=base, headers_only=not self.read)
            adapter = find_adapter(opened)
            if adapter is not None and base is not None:
                self.notes += _doubt_base(name, adapter.base_name, base)
            if adapter is not None and adapter.source and (beside := find_weights(adapter.source)):
                self.notes.append(
                    f"{name}: its adapter was read, the model next to it ({beside[0].name}) was not"
                )
            return opened
        model = self.open(f"the base of {name}", source.model, None)
        folded = open_checkpoint(source.adapter, name, base=model, headers_only=not self.read)
        if base is None:
            folded.folder = model.folder
        return folded

    def arrange(self, name: str, source: Arranged) -> Checkpoint:
        models: dict[str, Checkpoint] = {}
        for piece in source.pieces:
            name_of_model = _name_input(piece.model)
            if name_of_model not in models:
                opened = self.open(name_of_model, piece.model, None)
                models[name_of_model] = align(next(iter(models.values()), opened), opened, read=self.read)
        first, *others = models
        notes, problems = compare_configs(models[first], {n: models[n] for n in others}, self.allowed)
        self.notes += [note for note in notes if note not in self.notes]
        self.problems += [problem for problem in problems if problem not in self.problems]
        parts = [LayerRange(models[_name_input(p.model)], p.first, p.stop) for p in source.pieces]
        return arrange_layers(parts, name)


def _describe_folder(base: Checkpoint) -> list[str]:
    """Notes on what the base's folder holds besides the merged weights."""
    library, other, notes = find_library(base), find_other_weights(base), []
    if library is not None and other is not None:
        notes.append(f"the base is the model for {library.name}; {other.name} next to it was not read")
    parts = find_parts_with_weights(base.folder) if library is TRANSFORMERS and base.folder else []
    if parts:
        notes.append(f"{join_names(parts)}: weights of sentence-transformers outside the model are the base's")
    return notes


def _describe_twins(sources: Mapping[str, Any]) -> list[str]:
    """Warn of experts that were given twice; a recipe may do so on purpose."""
    names: dict[str, list[str]] = {}
    for name, source in sources.items():
        if isinstance(source, str | Path):
            path = Path(source).expanduser()
            names.setdefault(str(path.resolve()) if path.exists() else str(source), []).append(name)
    return [
        f"warning: {join_names(same)} are the same input, {_name_input(Path(source))}: is that meant?"
        for source, same in names.items()
        if len(same) > 1
    ]


def _require_kin(base: Checkpoint, expert: Checkpoint) -> Checkpoint:
    """Return the expert. Refuse one made for another weights file of the base's folder, or an adapter's factors
    without their model."""
    factors = [name for name in expert if _FACTOR.search(name)]
    if 2 * len(factors) > len(expert) and not base.keys() & expert.keys():
        raise InputError(
            f"expert {expert.label!r} holds an adapter's factors ({join_names(factors)}) without the "
            "adapter_config.json that peft writes with them: give the folder that has both, or a model that "
            "the adapter was merged into"
        )
    other = find_other_weights(base)
    if other is not None and 2 * len(base.keys() & expert.keys()) < len(expert):
        raise InputError(
            f"expert {expert.label!r} shares few names with the base, but {other.name} is next to the base: "
            f"if the expert belongs to that, set base={other}"
        )
    return expert


def _find_tokenizer_folder(
    wanted: str | Path | None, base: Checkpoint, experts: Mapping[str, Checkpoint]
) -> Path | None:
    if wanted is None:
        return None
    known = {**experts, "base": base}
    folder = known[str(wanted)].folder if str(wanted) in known else find_source(wanted, weights=False)
    if folder is None or not folder.is_dir():
        raise InputError(
            f"tokenizer_from={wanted} is neither a folder nor an expert{suggest(str(wanted), known)}"
        )
    if not find_tokenizer_files(folder):
        raise InputError(f"tokenizer_from={wanted}: the folder {folder} holds no tokenizer")
    return folder


def _name_tokenizer_source(
    wanted: str | Path | None, folder: Path | None, opened: Mapping[str, Checkpoint]
) -> str:
    if wanted is not None:
        return str(wanted) if str(wanted) in {*opened, "base"} else _name_input(wanted)
    return next((name for name, expert in opened.items() if folder and expert.folder == folder), "base")


def _check_tokenizer(folder: Path | None, base: Checkpoint) -> None:
    """Refuse a tokenizer with tokens that have no row in the result."""
    rows = count_vocabulary_rows(base)
    tokens = read_tokens(folder) if rows else None
    if rows and tokens and max(tokens.values()) >= rows:
        raise InputError(
            f"tokenizer_from={folder}: it has tokens up to row {max(tokens.values())}, but the result has "
            f"{rows} rows: set embeddings=pad, which adds rows"
        )


def read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by its name.

    Raises:
        InputError: no floating-point dtype that a checkpoint is stored in.
    """
    if dtype is None:
        return None
    if isinstance(dtype, torch.dtype):
        require(dtype.is_floating_point, "dtype", dtype, "a floating-point dtype")
        return dtype
    require_choice("dtype", dtype, FLOATING)
    value: torch.dtype = getattr(torch, dtype)
    return value


def _doubt_base(name: str, wanted: str, base: Checkpoint) -> list[str]:
    """Warn if an adapter names another base model than this one."""
    known = [str(read_config(base.folder).get("_name_or_path") or ""), str(base.folder or "")]
    mine = [name_of_base for each in known if (name_of_base := _strip_path(each))]
    if not _strip_path(wanted) or not mine or _strip_path(wanted) in mine:
        return []
    model = wanted if parse_hub_id(wanted) else Path(wanted).name
    return [
        f"warning: the adapter {name} was trained on {model!r}, and the base is called {mine[0]!r}: are they "
        "the same weights?"
    ]


def _strip_path(model: str) -> str:
    """The name of a model, from a hub id, a path, or its folder in the hub's cache."""
    parts = [part for part in model.casefold().split("/") if part]
    cached = [part.rpartition("--")[2] for part in parts if part.startswith("models--")]
    return (cached or parts or [""])[-1]


def _name_input(source: Any) -> str:
    """What a card calls an input: a hub id as it is, a path by its last part."""
    if isinstance(source, Adapter):
        return f"{_name_input(source.adapter)} on {_name_input(source.model)}"
    if isinstance(source, Arranged):
        return "layers of " + ", ".join(f"{_name_input(p.model)} {p.first}:{p.stop}" for p in source.pieces)
    if isinstance(source, str) and not Path(source).expanduser().exists():
        return source
    if isinstance(source, str | Path):
        path = Path(source).absolute()
        folder = shorten_path(path)
        return folder if folder == path.name else f"{folder}/{path.name}"
    return "in memory"
