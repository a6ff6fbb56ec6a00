"""The model that low-rank factors and their base make, with all experts' shares or some."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.progress import track

from mergekit_lab.checkpoints import (
    LowRank,
    ShardedWriter,
    make_folder,
    open_checkpoint,
    plan_model_files,
    plan_tokenizer_files,
    write_files,
)
from mergekit_lab.checkpoints.card import Card
from mergekit_lab.checkpoints.generation import follow_tokenizer
from mergekit_lab.checkpoints.libraries import find_library
from mergekit_lab.checkpoints.model_files import measure_files
from mergekit_lab.checkpoints.plain_files import read_json
from mergekit_lab.checkpoints.publish import RECORD, check_out
from mergekit_lab.checkpoints.shards import MAX_SHARD_BYTES, plan_files
from mergekit_lab.commands.prepared import plan_output
from mergekit_lab.console import is_watched
from mergekit_lab.errors import InputError
from mergekit_lab.merging.inputs import Source
from mergekit_lab.ranges import Count


def expand(
    low_rank: str | Path,
    base: Source,
    out: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    coefficient: float | None = None,
    overwrite: bool = False,
    max_shard_bytes: Count = MAX_SHARD_BYTES,
    progress: bool | None = None,
) -> Path:
    """Make the model that a merge with `format="low_rank"` stored, or a task's of `format="per_task"`.

    With all tasks and the stored coefficient this is the dense merge, bit for bit if both run on a CPU.

    Args:
        low_rank: the folder of factors.
        base: the model that the merge was on.
        out: the folder to make; it appears whole or not at all.
        tasks: the experts whose shares are added; all by default. For `per_task`, name the one task (TSVC
            takes several).
        coefficient: `α` in place of the stored one.
        overwrite: replace `out` if a merge wrote it.
        max_shard_bytes: the largest size of a file; 5 GB by default.
        progress: show a bar; by default in a terminal or a notebook.

    Returns:
        `out`.

    Raises:
        InputError: no such folder, another base, an unknown task, or an `out` that cannot be written.
    """
    progress = is_watched() if progress is None else progress
    folder, out = Path(low_rank).expanduser(), Path(out).expanduser()
    origin = open_checkpoint(base, "the base")
    model = LowRank(folder, origin, str(low_rank), tasks, coefficient)
    check_out(out, overwrite, [*origin.files, *model.files])
    specs, limit, stem = plan_output(origin, model.dtype, list(model.find_ties()), max_shard_bytes)
    beside: dict[str, Path | str] = {}
    if origin.folder is not None:
        beside |= plan_model_files(origin.folder, find_library(origin), model.dtype)
        if tokenizer := plan_tokenizer_files(folder):
            beside = follow_tokenizer(folder, {**beside, **tokenizer})
        else:
            beside |= plan_tokenizer_files(origin.folder)
    card = _make_card(folder, out.name, model, tasks)
    planned = plan_files(specs, limit, stem) | measure_files(beside)
    with make_folder(out, overwrite, planned) as staged:
        with ShardedWriter(staged, specs, limit, stem) as writer:
            for name in track(specs, f"expanding into {out.name}", disable=not progress, transient=True):
                writer.write(name, model[name])
        planned |= write_files({**beside, **card.make_files()}, staged)
    return out


def _make_card(folder: Path, title: str, model: LowRank, tasks: Sequence[str] | None) -> Card:
    """That of the merge, which says how the model came to be."""
    record = read_json(folder / RECORD)
    shares = "all experts" if tasks is None else ", ".join(tasks)
    note = f"expanded from low-rank factors at coefficient {model.coefficient:g}: the shares of {shares}"
    try:
        card = Card(**{**record, "title": title, "notes": [*record["notes"], note]})
        card.format_text()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / RECORD} is not what a merge writes ({error!r})") from None
    return card
