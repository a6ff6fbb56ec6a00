"""Merge checkpoints into a folder: what was prepared streams through the merge into its place.

Nothing is loaded whole: the files to be written are planned from headers, and tensors go to their place as
they come.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from mergekit_lab.checkpoints import (
    MAX_SHARD_BYTES,
    Card,
    LowRankRecord,
    ShardedWriter,
    check_out,
    copy_model_files,
    copy_tokenizer_files,
    fingerprint,
    follow_tokenizer,
    hub_id,
    new_folder,
    versions,
)
from mergekit_lab.commands.prepare import Devices, Prepared, prepare
from mergekit_lab.errors import InputError, listing, suggestion
from mergekit_lab.merging import Method, factor_method, merged_factors, merged_tensors
from mergekit_lab.merging.blocks import Notes
from mergekit_lab.merging.devices import device_names
from mergekit_lab.merging.inputs import Source, Sources, name_patterns


def merge(
    base: Source,
    experts: Sources,
    out: str | Path,
    method: Method,
    *,
    fishers: Sources | None = None,
    grams: Sources | None = None,
    statistics: Mapping[str, Sources] | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    dtype: str | torch.dtype | None = None,
    device: Devices = "auto",
    embeddings: str | None = None,
    tokenizer_from: str | Path | None = None,
    allow_config_mismatch: Sequence[str] = (),
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    format: str = "dense",
    metrics: Mapping[str, float] | None = None,
    progress: bool = False,
) -> Path:
    """Merge models into a folder that `transformers` or open_clip loads.

    Args:
        base: `θ0`: a folder, a file, a hub id (`org/name@revision`) or a state dict.
        experts: a mapping from name to the same or to a PEFT adapter's folder; or a list, named by folder.
        out: the folder to be made; whole or not at all.
        method: what to do, e.g. `TIES(preset="mergekit", density=0.2)`.
        fishers, grams: short for `statistics={"fisher": …, "gram": …}`.
        statistics: side inputs by kind, each a mapping by expert name or a list in the experts' order.
        include, exclude: name patterns, or one; tensors not included, or excluded, stay the base's.
        dtype: of the result's floating-point tensors; each tensor's own by default.
        device: where the arithmetic happens: "auto", one device, or a list of them.
        embeddings: what to do about vocabularies that differ: "intersect", "pad" or "base".
        tokenizer_from: a folder, a hub id or an expert's name whose tokenizer goes into `out`; the base's by
            default.
        allow_config_mismatch: keys of the experts' configurations that may differ from the base's though they
            decide what weights compute, as `["rope_theta"]`.
        overwrite: replace `out` if a merge wrote it.
        max_shard_bytes: of one file; 5 GB by default.
        format: "dense", or "low_rank": the factors of what a spectral merge (TSVM, EpiMer) adds to the base,
            with every expert's share apart; `expand` makes the model of them.
        metrics: numbers for the model card.
        progress: show a bar.

    Returns:
        `out`.

    Raises:
        InputError: whatever is wrong with the inputs or with `out`; nothing is written then.
    """
    for name, number in (metrics or {}).items():
        if not isinstance(number, int | float):
            raise InputError(f"metrics: {name} is {number!r}; it must be a number")
    for kind, given in (("fisher", fishers), ("gram", grams)):
        if given is not None:
            statistics = {**(statistics or {}), kind: given}
    prepared = prepare(
        base, experts, method, statistics=statistics, include=include, exclude=name_patterns(exclude),
        dtype=dtype, device=device_names(device), embeddings=embeddings, tokenizer_from=tokenizer_from,
        max_shard_bytes=max_shard_bytes, allow_config_mismatch=allow_config_mismatch,
    )  # fmt: skip
    return write(
        prepared, Path(out), overwrite=overwrite, format=format, metrics=metrics or {}, progress=progress
    )


def write(
    prepared: Prepared,
    out: Path,
    *,
    overwrite: bool = False,
    format: str = "dense",
    metrics: Mapping[str, float] | None = None,
    progress: bool = False,
    recipe: str | None = None,
) -> Path:
    """Merge what was prepared into `out`; see `merge`."""
    out = out.expanduser()
    check_out(out, overwrite, input_files(prepared))
    check_format(prepared, format)
    notes: Notes = {}
    if format == "dense":
        specs, limit, stem = prepared.plan(list(prepared.base.tied()))
        tensors = merged_tensors(**_arguments(prepared), dtype=prepared.dtype, notes=notes)
    else:
        specs, tensors = merged_factors(**_arguments(prepared), notes=notes)
        limit, stem = prepared.max_shard_bytes, LowRankRecord.stem
    _check_room(out, sum(spec.nbytes for spec in specs.values()))
    with new_folder(out, overwrite) as folder:
        with (
            ShardedWriter(folder, specs, limit, stem) as writer,
            _in_background(writer.write) as put,
            Progress(disable=not progress, transient=True) as bar,
        ):
            task = bar.add_task(f"merging into {out.name}", total=sum(s.numel for s in specs.values()))
            for name, tensor in tensors:
                if name in specs:
                    put(name, tensor)
                    bar.advance(task, tensor.numel())
        if format == "dense":
            _copy_files(prepared, folder)
        else:
            _low_rank_record(prepared).write(folder)
            if prepared.tokenizer is not None and prepared.tokenizer != prepared.base.folder:
                copy_tokenizer_files(prepared.tokenizer, folder)
                follow_tokenizer(prepared.tokenizer, folder)
        _card(prepared, out.name, metrics or {}, recipe, _account(notes)).write(folder)
    return out


def _arguments(prepared: Prepared) -> dict[str, Any]:
    return {
        "base": prepared.base,
        "experts": prepared.experts,
        "method": prepared.method,
        "statistics": prepared.side,
        "device": prepared.device,
        "include": prepared.include,
        "exclude": prepared.left_out,
    }


def check_format(prepared: Prepared, format: str) -> None:
    """Refuse a format that there is not, or that does not hold this merge."""
    if format not in _FORMATS:
        raise InputError(f"format is {format!r}{suggestion(format, _FORMATS)}")
    if format == "low_rank":
        factor_method(prepared.method)
        if prepared.vocabulary is not None:
            raise InputError("format=low_rank adds to the base as it is: its vocabulary cannot grow")
        if prepared.base.untied:
            untied = listing(prepared.base.untied)
            raise InputError(f"format=low_rank adds to the base as it is, and an expert unties {untied}")


_FORMATS = ("dense", "low_rank")


def _low_rank_record(prepared: Prepared) -> LowRankRecord:
    return LowRankRecord(
        experts=list(prepared.experts),
        coefficient=prepared.method.scale,
        dtype=None if prepared.dtype is None else str(prepared.dtype).removeprefix("torch."),
        tied=prepared.base.tied(),
        base=fingerprint(prepared.origin, prepared.base_source),
    )


@contextmanager
def _in_background(
    work: Callable[[str, Tensor], None], ahead: int = 2
) -> Iterator[Callable[[str, Tensor], None]]:
    """`work` in a thread of its own, at most `ahead` tensors behind; its errors come out at the next call."""
    flying: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "write") as pool:

        def put(name: str, tensor: Tensor) -> None:
            flying.append(pool.submit(work, name, tensor))
            while len(flying) > ahead:
                flying.popleft().result()

        yield put
        while flying:
            flying.popleft().result()


def input_files(prepared: Prepared) -> list[Path]:
    """All files that a merge reads: of the base, the experts and the side inputs."""
    side = [checkpoint for by_name in prepared.side.values() for checkpoint in by_name.values()]
    return [file for c in (prepared.origin, *prepared.opened.values(), *side) for file in c.files]


def _check_room(out: Path, needed: int) -> None:
    there = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise InputError(f"out={out} needs {needed / 1e9:.1f} GB of disk and {free / 1e9:.1f} GB are free")


def _copy_files(prepared: Prepared, folder: Path) -> None:
    if prepared.base.folder is not None:
        copy_model_files(
            prepared.base.folder, folder, prepared.library, prepared.dtype, prepared.vocabulary,
            prepared.base.changed,
        )  # fmt: skip
    if prepared.tokenizer is not None:
        copy_tokenizer_files(prepared.tokenizer, folder)
        if prepared.tokenizer != prepared.base.folder:
            follow_tokenizer(prepared.tokenizer, folder)


def _account(notes: Notes) -> list[str]:
    """What the method noted of single tensors, a sentence a diagnostic: of numbers their mean and range, of
    anything else where it holds."""
    numbers: dict[str, list[float]] = {}
    others: dict[str, list[str]] = {}
    for tensor, found in notes.items():
        for key, value in found.items():
            if isinstance(value, int | float):
                numbers.setdefault(key, []).append(value)
            else:
                others.setdefault(f"{key} {value}", []).append(tensor)
    lines = [
        f"{key}: {sum(v) / len(v):.4g} in the mean of {len(v)} tensors, from {min(v):.4g} to {max(v):.4g}"
        for key, v in numbers.items()
    ]
    return lines + [f"{said} ({len(names)} tensors: {listing(names)})" for said, names in others.items()]


def _card(
    prepared: Prepared, title: str, metrics: Mapping[str, float], recipe: str | None, account: Sequence[str]
) -> Card:
    side = {
        kind: {name: fingerprint(c, c.label) for name, c in by_name.items()}
        for kind, by_name in prepared.side.items()
    }
    every = [prepared.base_source, *prepared.sources.values()]
    ids = list(dict.fromkeys(source.split("@")[0] for source in every if hub_id(source)))
    return Card(
        title=title,
        method=type(prepared.method).__name__,
        hyper_parameters=_fields(prepared.method),
        base=fingerprint(prepared.origin, prepared.base_source),
        experts={name: fingerprint(c, prepared.sources[name]) for name, c in prepared.opened.items()},
        side=side,
        settings={
            "dtype": "each tensor's own"
            if prepared.dtype is None
            else str(prepared.dtype).removeprefix("torch."),
            "include": prepared.include,
            "exclude": list(prepared.exclude) or None,
            "embeddings": prepared.embeddings,
            "tokenizer": prepared.tokenizer_source,
        },
        versions=versions(),
        hub_ids=ids,
        notes=[*prepared.notes, *account],
        metrics=metrics,
        recipe=recipe,
    )


def _fields(method: Any) -> dict[str, Any]:
    """A method's hyper-parameters as plain values; nested methods as mappings, a coefficient as it is used."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(method):
        value = getattr(method, item.name)
        if dataclasses.is_dataclass(value):
            value = {"method": type(value).__name__, **_fields(value)}
        if item.name == "coefficient" and value is None:
            value = method.scale
        if item.repr:
            found[item.name] = value
    return found
