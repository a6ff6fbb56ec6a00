"""Stage expand: the model that low-rank factors and their base make, with all experts' shares or some."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.progress import track

from mergekit_lab.checkpoints import (
    MAX_SHARD_BYTES,
    RECORD,
    Card,
    LowRank,
    ShardedWriter,
    check_out,
    copy_model_files,
    copy_tokenizer_files,
    follow_tokenizer,
    library_of,
    new_folder,
    open_checkpoint,
)
from mergekit_lab.commands.prepare import plan_output
from mergekit_lab.errors import InputError
from mergekit_lab.merging.inputs import Source
from mergekit_lab.schema.check import TopLevel

log = logging.getLogger(__name__)
NAME = "expand"


def expand(
    low_rank: str | Path,
    base: Source,
    out: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    coefficient: float | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = False,
) -> Path:
    """Make the model that a merge with `format="low_rank"` stored.

    With all tasks and the stored coefficient it is the one that the same merge writes dense: bit for bit where
    both are made on a CPU.

    Args:
        low_rank: the folder of factors.
        base: the model that the merge was on.
        out: the folder to be made; whole or not at all.
        tasks: the experts whose shares are added; all by default.
        coefficient: `α` in place of the stored one.
        overwrite: replace `out` if a merge wrote it.
        max_shard_bytes: of one file.
        progress: show a bar.

    Returns:
        `out`.

    Raises:
        InputError: no such folder, another base, an unknown task; a place where nothing may be written.
    """
    folder, out = Path(low_rank).expanduser(), Path(out).expanduser()
    origin = open_checkpoint(base, "the base")
    model = LowRank(folder, origin, str(low_rank), tasks, coefficient)
    check_out(out, overwrite, [*origin.files, *model.files])
    specs, limit, stem = plan_output(origin, model.dtype, list(model.tied()), max_shard_bytes)
    with new_folder(out, overwrite) as made:
        with ShardedWriter(made, specs, limit, stem) as writer:
            for name in track(specs, f"expanding into {out.name}", disable=not progress, transient=True):
                writer.write(name, model[name])
        if origin.folder is not None:
            copy_model_files(origin.folder, made, library_of(origin), model.dtype)
            if copy_tokenizer_files(folder, made):
                follow_tokenizer(folder, made)
            else:
                copy_tokenizer_files(origin.folder, made)
        _card(folder, out.name, model, tasks).write(made)
    return out


def _card(folder: Path, title: str, model: LowRank, tasks: Sequence[str] | None) -> Card:
    """That of the merge, which says how the model came to be."""
    try:
        record = json.loads((folder / RECORD).read_text())
        shares = "all experts" if tasks is None else ", ".join(tasks)
        note = f"expanded from low-rank factors at coefficient {model.coefficient:g}: the shares of {shares}"
        return Card(**{**record, "title": title, "notes": [*record["notes"], note]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{folder / RECORD} cannot be read ({error})") from None


@dataclass(frozen=True)
class Expand(TopLevel):
    """The top level of the configuration of this stage; for its own keys see `expand`."""

    low_rank: str | None
    base: str | None
    out: str | None
    tasks: list[str] | None
    coefficient: float | None
    overwrite: bool
    max_shard_bytes: int


def run_expand(cfg: DictConfig) -> None:
    """Expand.

    Raises:
        InputError: it does not work.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    given = Expand(**plain)
    if not (given.low_rank and given.base and given.out):
        raise InputError("set low_rank=<folder of factors>, base=<folder, file or hub id> and out=<folder>")
    out = expand(
        given.low_rank,
        given.base,
        given.out,
        tasks=given.tasks,
        coefficient=given.coefficient,
        overwrite=given.overwrite,
        max_shard_bytes=given.max_shard_bytes,
        progress=given.progress,
    )
    log.info("expanded %s into %s", given.low_rank, out)
