"""Write the merge of prepared checkpoints into a folder.

No model is loaded whole. The files are planned from headers, and each merged tensor is written to its place as
soon as it is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, SpinnerColumn, Task, TimeRemainingColumn, track
from rich.text import Text
from torch import Tensor

from mergekit_lab.checkpoints import (
    LowRankRecord,
    ShardedWriter,
    find_adapter,
    fingerprint,
    make_folder,
    parse_hub_id,
    plan_model_files,
    plan_tokenizer_files,
    push_folder,
    write_files,
)
from mergekit_lab.checkpoints.adapter_writing import write_adapter
from mergekit_lab.checkpoints.card import Card, read_versions
from mergekit_lab.checkpoints.generation import follow_tokenizer
from mergekit_lab.checkpoints.model_files import measure_files
from mergekit_lab.checkpoints.publish import check_out
from mergekit_lab.checkpoints.shards import plan_files
from mergekit_lab.commands.hub_card import describe_for_hub, say_command, say_usage, write_recipe
from mergekit_lab.commands.prepared import Prepared, plan_output
from mergekit_lab.errors import InputError, join_names, say_bytes
from mergekit_lab.machine import count_free_bytes
from mergekit_lab.merging import merge_factors, merge_tensors, require_factors
from mergekit_lab.merging.adapter import AdapterMerge
from mergekit_lab.merging.blocks import Notes
from mergekit_lab.merging.jobs import count_work
from mergekit_lab.prefetch import prefetch
from mergekit_lab.ranges import require_choice


def write(
    prepared: Prepared,
    out: Path,
    *,
    overwrite: bool = False,
    format: str = "dense",
    rank: int | None = None,
    energy: float | None = None,
    metrics: Mapping[str, float] | None = None,
    progress: bool = False,
    recipe: str | None = None,
    push_to: str | None = None,
    push_private: bool = True,
) -> Path:
    """Merge what was prepared into the folder `out`; `merge` says what the arguments are."""
    out = out.expanduser()
    check_out(out, overwrite, list_input_files(prepared))
    check_format(prepared, format, rank, energy)
    make_card = partial(_make_card, prepared, out.name, format, metrics or {}, recipe, push_to)
    if format == "adapter":
        _write_adapter(prepared, out, overwrite, rank, energy, progress, make_card)
    else:
        _write_model(prepared, out, overwrite, format, progress, make_card)
    if push_to is not None:
        push_folder(out, push_to, push_private)
    return out


MakeCard = Callable[[Sequence[str]], Card]
"""Of what was found while merging, in sentences."""


class _Remaining(TimeRemainingColumn):
    """The time left, after a twentieth is done: the first, small tensors say little about the speed."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.percentage >= 5 else Text("-:--:--", "progress.remaining")


def _write_model(
    prepared: Prepared, out: Path, overwrite: bool, format: str, progress: bool, make_card: MakeCard
) -> None:
    notes: Notes = {}
    if format == "dense":
        ties = list(prepared.base.find_ties())
        specs, limit, stem = plan_output(prepared.base, prepared.dtype, ties, prepared.max_shard_bytes)
        tensors = merge_tensors(**_collect_arguments(prepared), dtype=prepared.dtype, notes=notes)
    else:
        specs, tensors = merge_factors(**_collect_arguments(prepared), notes=notes)
        limit, stem = prepared.max_shard_bytes, LowRankRecord.stem
    beside = plan_files_beside(prepared, format)
    planned = plan_files(specs, limit, stem) | measure_files(beside)
    check_room(out, sum(planned.values()))
    with make_folder(out, overwrite, planned) as folder:
        with (
            ShardedWriter(folder, specs, limit, stem) as writer,
            Progress(
                SpinnerColumn(),
                *Progress.get_default_columns()[:-1],
                _Remaining(),
                disable=not progress,
                transient=True,
                speed_estimate_period=600.0,  # of a whole merge, whose tensors differ in what they cost
            ) as bar,
        ):
            work = {name: count_work(prepared.method, name, spec.shape) for name, spec in specs.items()}
            task = bar.add_task(f"merging into {out.name}", total=sum(work.values()))
            results = ((name, tensor) for name, tensor in tensors if name in specs)
            with closing(prefetch(lambda entry: _write_tensor(writer, *entry), results, ahead=2)) as written:
                for name in written:
                    bar.advance(task, work[name])
        if format != "dense":
            origin = fingerprint(prepared.origin, prepared.base_source)
            settings = (prepared.method.scale, prepared.dtype_name, prepared.base.find_ties(), origin)
            beside |= LowRankRecord(list(prepared.experts), *settings).make_files()
        beside |= make_card(_summarize_notes(notes)).make_files()
        planned |= write_files(beside, folder)


def _write_adapter(
    prepared: Prepared,
    out: Path,
    overwrite: bool,
    rank: int | None,
    energy: float | None,
    progress: bool,
    make_card: MakeCard,
) -> None:
    notes: Notes = {}
    arguments = _collect_arguments(prepared)
    merge = AdapterMerge(arguments.pop("base"), arguments.pop("experts"), arguments.pop("method"), rank, energy)
    streamed = merge.read_changes(**arguments, notes=notes)
    beside = plan_files_beside(prepared, "adapter")
    planned: dict[str, int] = {}
    with make_folder(out, overwrite, planned) as folder:
        changes = dict(track(streamed, f"factorizing into {out.name}", disable=not progress, transient=True))
        planned |= write_adapter(
            folder, changes, base_name=_name_base(prepared), base_folder=prepared.base.folder,
            transposed=merge.transposed, one_rank=merge.joined, dtype=prepared.dtype or torch.float32,
        )  # fmt: skip
        account = [*merge.describe(), *_summarize_notes(notes)]
        beside |= make_card(account).make_files()
        planned |= write_files(beside, folder)


def _name_base(prepared: Prepared) -> str:
    """The hub id by which a written adapter names its base: the experts' adapters', or the base's own."""
    names = {folded.base_name for e in prepared.experts.values() if (folded := find_adapter(e))}
    name = names.pop() if len(names) == 1 else prepared.base_source
    return name.split("@")[0] if parse_hub_id(name) else ""


def _collect_arguments(prepared: Prepared) -> dict[str, Any]:
    return {
        "base": prepared.base,
        "experts": prepared.experts,
        "method": prepared.method,
        "statistics": prepared.side,
        "device": prepared.device,
        "include": prepared.include,
        "exclude": prepared.left_out,
    }


def check_format(prepared: Prepared, format: str, rank: int | None = None, energy: float | None = None) -> None:
    """Refuse an unknown format, and one that cannot hold this merge."""
    require_choice("format", format, ("dense", "low_rank", "per_task", "adapter"))
    if format == "adapter":
        AdapterMerge(prepared.base, prepared.experts, prepared.method, rank, energy)
    elif rank is not None or energy is not None:
        raise InputError("rank and energy are for format=adapter; a merger's own rank is merger.rank")
    if format in ("low_rank", "per_task"):
        require_factors(prepared.method, format == "per_task")
    if format != "dense":
        if prepared.vocabulary is not None:
            raise InputError(f"format={format} stores only changes to the base, so its vocabulary cannot grow")
        if prepared.base.untied:
            untied = join_names(prepared.base.untied)
            raise InputError(f"format={format} stores only changes to the base, but an expert unties {untied}")


def _write_tensor(writer: ShardedWriter, name: str, tensor: Tensor) -> str:
    """Write a tensor; returns its name."""
    writer.write(name, tensor)
    return name


def list_input_files(prepared: Prepared) -> list[Path]:
    """All files that a merge reads: of the base, the experts and the side inputs."""
    side = [checkpoint for by_name in prepared.side.values() for checkpoint in by_name.values()]
    return [file for c in (prepared.origin, *prepared.opened.values(), *side) for file in c.files]


def check_room(out: Path, needed: int) -> None:
    """Refuse a merge that the disk has no room for."""
    free = count_free_bytes(out)
    if needed > free:
        raise InputError(f"out={out} needs {say_bytes(needed)} of disk and {say_bytes(free)} are free")


def plan_files_beside(prepared: Prepared, format: str) -> dict[str, Path | str]:
    """The result's configuration, tokenizer and licenses. Factors get only those that differ from the base's.

    Raises:
        InputError: one of them cannot be copied.
    """
    files: dict[str, Path | str] = {}
    if format == "dense" and prepared.base.folder is not None:
        files |= plan_model_files(
            prepared.base.folder, prepared.library, prepared.dtype, prepared.vocabulary, prepared.base.changed
        )
    other = prepared.tokenizer != prepared.base.folder or prepared.added_tokens
    if prepared.tokenizer is not None and (format == "dense" or other):
        files |= plan_tokenizer_files(prepared.tokenizer, prepared.added_tokens)
        if prepared.tokenizer != prepared.base.folder:
            files = follow_tokenizer(prepared.tokenizer, files)
    if prepared.chat_template is not None:
        files["chat_template.jinja"] = prepared.chat_template
    return files


def _summarize_notes(notes: Notes) -> list[str]:
    """A sentence for each diagnostic that the method noted for tensors: the mean and range of numbers, and for
    anything else the tensors where it holds."""
    numbers: dict[str, list[float]] = {}
    others: dict[str, list[str]] = {}
    for tensor, values in notes.items():
        for key, value in values.items():
            if isinstance(value, int | float):
                numbers.setdefault(key, []).append(value)
            else:
                others.setdefault(f"{key} {value}", []).append(tensor)
    lines = [
        f"{key}: {sum(v) / len(v):.4g} in the mean of {len(v)} tensors, from {min(v):.4g} to {max(v):.4g}"
        for key, v in numbers.items()
    ]
    return lines + [f"{note} ({len(names)} tensors: {join_names(names)})" for note, names in others.items()]


def _make_card(
    prepared: Prepared,
    title: str,
    format: str,
    metrics: Mapping[str, float],
    recipe: str | None,
    push_to: str | None,
    account: Sequence[str],
) -> Card:
    side = {
        kind: {name: fingerprint(c, c.label) for name, c in by_name.items()}
        for kind, by_name in prepared.side.items()
    }
    every = [prepared.base_source, *prepared.sources.values()]
    ids = list(dict.fromkeys(source.split("@")[0] for source in every if parse_hub_id(source)))
    return Card(
        title=title,
        method=type(prepared.method).__name__,
        hyper_parameters=_list_fields(prepared.method),
        base=fingerprint(prepared.origin, prepared.base_source),
        experts={name: fingerprint(c, prepared.sources[name]) for name, c in prepared.opened.items()},
        side=side,
        settings={
            "dtype": prepared.dtype_name or "each tensor's own",
            "include": prepared.include,
            "exclude": list(prepared.exclude) or None,
            "embeddings": prepared.embeddings,
            "tokenizer": prepared.tokenizer_source,
        },
        versions=read_versions(),
        hub_ids=ids,
        notes=[*prepared.notes, *account],
        metrics=metrics,
        recipe=recipe,
        hub=describe_for_hub(prepared),
        usage="" if format != "dense" else say_usage(prepared, title, push_to),
        command=say_command(prepared, title, format),
        equivalent="" if recipe or format != "dense" else write_recipe(prepared),
    )


def _list_fields(method: Any) -> dict[str, Any]:
    """A method's hyper-parameters as plain values; nested methods as mappings, a coefficient as it is used."""
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(method):
        value = getattr(method, item.name)
        if dataclasses.is_dataclass(value):
            value = {"method": type(value).__name__, **_list_fields(value)}
        if item.name == "coefficient" and value is None:
            value = method.scale
        if item.repr:
            fields[item.name] = value
    return fields
