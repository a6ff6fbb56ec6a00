"""Stage merge_checkpoints: merge models that are there already, from folders, files or the hub."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mergekit_lab.commands.dry_run import report
from mergekit_lab.commands.prepare import Prepared, prepare
from mergekit_lab.commands.recipe import read_recipe
from mergekit_lab.commands.write import check_format, write
from mergekit_lab.errors import InputError, listing
from mergekit_lab.merging import Method
from mergekit_lab.merging.devices import device_names
from mergekit_lab.schema.check import TopLevel, build, without_null_coefficient

log = logging.getLogger(__name__)
NAME = "merge_checkpoints"


@dataclass(frozen=True)
class MergeCheckpoints(TopLevel):
    """The top level of the configuration of this stage, which builds no backbone and no task.

    Args:
        base: a folder, a file or a hub id.
        experts: a list of the same and of PEFT adapters' folders, a mapping from name to one, or `@list.txt`: a
            file with a line each, `path` or `name=path`.
        out: the folder to be made.
        recipe: a mergekit YAML in place of `base`, `experts` and `merger`.
        merger: the method; a coefficient that is null is the method's own default, nothing is searched here.
        fishers, grams: side inputs, in the experts' order or by name; `@list.txt` too.
        include, exclude: name patterns of tensors.
        embeddings: intersect, pad or base, where vocabularies differ.
        tokenizer_from: a folder, a hub id or an expert's name.
        allow_config_mismatch: keys of configurations that may differ.
        dtype: float32, float16, bfloat16, …; null: each tensor's own.
        format: dense, or low_rank: what a spectral merge adds to the base, in factors.
        dry_run: read headers only, and say what would happen.
        overwrite: replace `out` if a merge wrote it.
        max_shard_bytes: of one file.
    """

    base: str | None
    out: str | None
    recipe: str | None
    fishers: Any
    grams: Any
    include: list[str] | None
    exclude: list[str]
    embeddings: str | None
    tokenizer_from: str | None
    allow_config_mismatch: list[str]
    dtype: str | None
    format: str
    overwrite: bool
    max_shard_bytes: int


def run_merge_checkpoints(cfg: DictConfig) -> None:
    """Merge, or with `dry_run` say whether it would work.

    Raises:
        InputError: it does not work.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    given = MergeCheckpoints(**plain)
    prepared, text = _prepare(given, cfg)
    out = Path(given.out) if given.out else None
    check_format(prepared, given.format)
    if given.dry_run:
        found = report(prepared, out, given.overwrite, given.format)
        print(found.text())
        if not found.works:
            raise InputError("the merge would not work: see the problems above")
        return
    if out is None:
        raise InputError("out is not set: out=<folder>")
    write(prepared, out, overwrite=given.overwrite, format=given.format, progress=given.progress, recipe=text)
    for note in prepared.notes:
        log.info("%s", note)
    total = sum(path.stat().st_size for path in out.expanduser().iterdir())
    log.info("merged %d experts into %s (%.2f GB)", len(prepared.experts), out, total / 1e9)


def _prepare(given: MergeCheckpoints, cfg: DictConfig) -> tuple[Prepared, str | None]:
    shared: dict[str, Any] = {
        "statistics": {
            kind: read_sources(value, name)
            for kind, name, value in (("fisher", "fishers", given.fishers), ("gram", "grams", given.grams))
            if value is not None
        },
        "include": given.include,
        "exclude": given.exclude,
        "device": device_names(given.device),
        "max_shard_bytes": given.max_shard_bytes,
        "allow_config_mismatch": given.allow_config_mismatch,
        "read": not given.dry_run,
    }
    if given.recipe is not None:
        clashing = [name for name in ("base", "experts", "merger") if getattr(given, name)]
        if clashing:
            raise InputError(
                f"recipe={given.recipe} says what {' and '.join(clashing)} are: give one or the other"
            )
        recipe = read_recipe(Path(given.recipe).expanduser(), seed=given.seed)
        prepared = prepare(
            recipe.base,
            recipe.experts,
            recipe.method,
            dtype=given.dtype or recipe.dtype,
            embeddings=given.embeddings or recipe.embeddings,
            tokenizer_from=given.tokenizer_from or recipe.tokenizer_from,
            **shared,
        )
        return replace(prepared, notes=[*recipe.notes, *prepared.notes]), recipe.text
    if not given.base:
        raise InputError("base is not set: base=<folder, file or hub id>, or recipe=merge.yml")
    if not given.experts:
        raise InputError("experts is not set: experts=[a,b], experts=@list.txt, or recipe=merge.yml")
    prepared = prepare(
        given.base,
        read_sources(given.experts, "experts"),
        _method(cfg),
        dtype=given.dtype,
        embeddings=given.embeddings,
        tokenizer_from=given.tokenizer_from,
        **shared,
    )
    return prepared, None


def _method(cfg: DictConfig) -> Method:
    if cfg.merger is None:
        raise InputError("no merger is set: merger=ties merger.preset=mergekit, or recipe=merge.yml")
    node: Any = OmegaConf.to_container(cfg.merger, resolve=True)
    method = build(without_null_coefficient(node)[0])
    if not isinstance(method, Method):
        raise InputError(f"merger is a {type(method).__name__}, not a merging method")
    return method


def read_sources(value: Any, what: str) -> list[str] | dict[str, str]:
    """A list, a mapping, or the lines of the file that `@path` names.

    Raises:
        InputError: none of these, or an empty one.
    """
    if isinstance(value, str):
        if not value.startswith("@"):
            raise InputError(f"{what}={value} is one path: give a list, {what}=[{value}], or {what}=@list.txt")
        file = Path(value[1:]).expanduser()
        if not file.is_file():
            raise InputError(f"{what}={value}: there is no file {file}")
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{what}={value}: {file} cannot be read ({error})") from None
        value = [line for line in lines if line and not line.startswith("#")]
        pairs = [line.split("=", 1) for line in value]
        if pairs and all(len(pair) == 2 and "/" not in pair[0] for pair in pairs):
            names = [name.strip() for name, _ in pairs]
            if len(set(names)) < len(names):
                raise InputError(f"{what}={value}: {file} gives a name twice ({listing(names)})")
            return {name.strip(): path.strip() for name, path in pairs}
    if not isinstance(value, list | Mapping) or not value:
        raise InputError(f"{what} is {value!r}; it must be a list or a mapping of checkpoints")
    paths = list(value.values()) if isinstance(value, Mapping) else value
    odd = [path for path in paths if isinstance(path, bool) or not isinstance(path, str | int | float)]
    if odd:
        raise InputError(f"{what} holds {odd[0]!r}, which is no path")
    if isinstance(value, Mapping):
        return {str(name): str(path) for name, path in value.items()}
    return [str(path) for path in paths]
