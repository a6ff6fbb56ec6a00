"""Merge models that are there already, from folders, files or the hub: from Python, and as a command."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import torch

from mergekit_lab.checkpoints import check_push
from mergekit_lab.checkpoints.publish import check_out
from mergekit_lab.checkpoints.shards import MAX_SHARD_BYTES
from mergekit_lab.commands import derive_settings
from mergekit_lab.commands.prepare import prepare
from mergekit_lab.commands.prepared import Prepared
from mergekit_lab.commands.sources import list_local_paths, read_sources
from mergekit_lab.commands.write import check_format, write
from mergekit_lab.console import is_watched
from mergekit_lab.errors import InputError, say_bytes
from mergekit_lab.merging import Method
from mergekit_lab.merging.devices import Devices
from mergekit_lab.merging.inputs import Source, Sources, list_patterns
from mergekit_lab.ranges import Count, Share, require
from mergekit_lab.schema.target import Target, without_null_coefficient

if TYPE_CHECKING:
    from mergekit_lab.commands.recipes import Recipe

log = logging.getLogger(__name__)


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
    embeddings: Literal["intersect", "pad", "base"] | None = None,
    tokenizer_from: str | Path | None = None,
    allow_config_mismatch: Sequence[str] = (),
    buffers: Literal["merge", "base"] = "merge",
    overwrite: bool = False,
    max_shard_bytes: Count = MAX_SHARD_BYTES,
    format: Literal["dense", "low_rank", "per_task", "adapter"] = "dense",
    rank: Count | None = None,
    energy: Share | None = None,
    metrics: Mapping[str, float] | None = None,
    push_to: str | None = None,
    push_private: bool = True,
    progress: bool | None = None,
) -> Path:
    """Merge models into a folder that `transformers` or open_clip loads.

    Args:
        base: `θ0`: a folder, a file, a hub id (`org/name@revision`) or a state dict.
        experts: the same, or PEFT adapters' folders; a mapping from name, or a list, named by folder.
        out: the folder to make; it appears whole or not at all.
        method: what to do, e.g. `TIES(preset="mergekit", density=0.2)`.
        fishers, grams: short for `statistics={"fisher": …, "gram": …}`.
        statistics: side inputs by kind, each a mapping by expert name or a list in the experts' order.
        include, exclude: name patterns, or one; tensors not included, or excluded, stay the base's.
        dtype: the result's floating-point dtype; each tensor's own by default.
        device: where the arithmetic happens: "auto", one device, or a list of them.
        embeddings: what to do if vocabularies differ: "intersect", "pad" or "base"; an error by default.
        tokenizer_from: a folder, a hub id or an expert's name whose tokenizer goes into `out`; the base's by
            default.
        allow_config_mismatch: keys that may differ between configurations although they change what the
            weights compute, such as `["rope_theta"]`.
        buffers: "merge" batch norm's running statistics as other tensors, or keep those of the "base".
        overwrite: replace `out` if a merge wrote it.
        max_shard_bytes: the largest size of a file; 5 GB by default.
        format: "dense", a whole model; "low_rank", the factors that a spectral merge (TSVM, EpiMer) adds to
            the base; "per_task", what a method with a model for every task (TSVC, EMR) adds; or "adapter", one
            LoRA adapter for peft. `expand` makes models of the middle two.
        rank: an adapter's largest rank. None takes the sum of the experts' ranks, if the merge is a weighted
            sum of adapters.
        energy: the share of each weight's squared change that an adapter keeps, in (0, 1]; instead of or
            beside `rank`.
        metrics: numbers for the model card, such as `{"gsm8k": 0.41, "arc_easy/acc_norm": 0.7}`.
        push_to: a repository of the hub, `org/name`, to upload to; it is created if it does not exist.
        push_private: whether a new repository is private.
        progress: show a bar; by default in a terminal or a notebook.

    Returns:
        `out`.

    Raises:
        InputError: the inputs or `out` are wrong, and nothing is written; or the upload failed, and `out`
            stays.
    """
    check_push(push_to)
    for name, number in (metrics or {}).items():
        require(isinstance(number, int | float), f"metrics: {name}", number, "a number")
    check_out(Path(out).expanduser(), overwrite, list_local_paths(base, experts))
    for kind, sources in (("fisher", fishers), ("gram", grams)):
        if sources is not None:
            statistics = {**(statistics or {}), kind: sources}
    prepared = prepare(
        base, experts, method, statistics=statistics, include=include, exclude=list_patterns(exclude),
        dtype=dtype, device=device, embeddings=embeddings, tokenizer_from=tokenizer_from,
        max_shard_bytes=max_shard_bytes, allow_config_mismatch=allow_config_mismatch, buffers=buffers,
    )  # fmt: skip
    return write(
        prepared, Path(out), overwrite=overwrite, format=format, rank=rank, energy=energy,
        metrics=metrics or {}, progress=is_watched() if progress is None else progress,
        push_to=push_to, push_private=push_private,
    )  # fmt: skip


@dataclass(frozen=True)
class MergeCheckpoints(
    derive_settings("merge_checkpoints", merge, left_out=("method", "statistics"))  # type: ignore[misc]
):
    """The configuration of the command: the arguments of `merge`, and these.

    Args:
        recipe: a mergekit YAML in place of `base`, `experts` and `merger`.
        experts, fishers, grams: `@list.txt` too, a file with a line each, `path` or `name=path`.
        merger: the method; a coefficient that is null is the method's own default, nothing is searched here.
        dry_run: read headers only, and say what would happen.
        seed: of a recipe's methods that draw random numbers.
    """

    recipe: str | None
    merger: Target[Method] | None
    dry_run: bool
    seed: int

    def run(self, folder: Path) -> None:
        """Merge, or with `dry_run` say whether it would work.

        Raises:
            InputError: it does not work.
        """
        with TemporaryDirectory(prefix="recipe-") as documents:
            self._run(Path(documents))

    def _run(self, folder: Path) -> None:
        check_push(self.push_to)
        inputs, notes, recipe = self._read_inputs(None if self.dry_run else folder)
        out = Path(self.out) if self.out else None
        if out is not None and not self.dry_run:  # a dry run has this in its report
            check_out(out.expanduser(), self.overwrite, list_local_paths(inputs["base"], inputs["experts"]))
        prepared = self._prepare(inputs)
        prepared = replace(prepared, notes=[*notes, *prepared.notes])
        check_format(prepared, self.format, self.rank, self.energy)
        if self.dry_run or out is None:
            from mergekit_lab.commands.dry_run import report

            result = report(prepared, out, self.overwrite, self.format)
            print(result.format_text())
            if not result.works:
                raise InputError("the merge would not work: see the problems above")
            return
        write(prepared, **{**self._select_for(write), "out": out, "recipe": recipe})
        for note in prepared.notes:
            log.info("%s", note)
        total = sum(path.stat().st_size for path in out.expanduser().iterdir())
        count = len(prepared.experts)
        log.info("merged %d expert%s into %s (%s)", count, "s" * (count > 1), out, say_bytes(total))

    def _read_inputs(self, folder: Path | None) -> tuple[dict[str, Any], Sequence[str], str | None]:
        """What is merged and how, as arguments of `prepare`; notes on a recipe, and its text.

        Args:
            folder: for the models that a recipe's other documents make. None: they are not made.
        """
        if self.recipe is None:
            from mergekit_lab.schema.check import build

            assert self.merger is not None
            method = build(without_null_coefficient(self.merger)[0], Method)
            experts = read_sources(self.experts, "experts")
            return {"base": self.base, "experts": experts, "method": method}, (), None
        from mergekit_lab.commands.recipes import read_recipe

        clashing = [name for name in ("base", "experts", "merger") if getattr(self, name)]
        if clashing:
            raise InputError(f"recipe={self.recipe} already sets {' and '.join(clashing)}: leave that out")
        recipe = read_recipe(Path(self.recipe).expanduser(), self.seed, folder)
        if folder is not None:
            for name, document in recipe.documents.items():
                log.info("merging %s, which the recipe needs", name)
                write(self._prepare(self._read_recipe(document)), folder / name, progress=self.progress)
        return self._read_recipe(recipe), recipe.notes, recipe.text

    def _read_recipe(self, recipe: Recipe) -> dict[str, Any]:
        """A recipe as arguments of `prepare`. A setting of the command line counts before the recipe's."""
        names = ("dtype", "embeddings", "tokenizer_from")
        own = {name: getattr(self, name) or getattr(recipe, name) for name in names}
        own |= {name: getattr(recipe, name) for name in ("base", "experts", "chat_template", "tokens")}
        return own | {"method": recipe.make_method}

    def _prepare(self, inputs: Mapping[str, Any]) -> Prepared:
        sides = {"fisher": self.fishers, "gram": self.grams}
        statistics = {kind: read_sources(v, f"{kind}s") for kind, v in sides.items() if v is not None}
        own = {"statistics": statistics, "read": not self.dry_run}
        return prepare(**{**self._select_for(prepare), **inputs, **own})

    def _select_for(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The settings that a function takes under the same names."""
        taken = inspect.signature(function).parameters
        return {name: value for name, value in vars(self).items() if name in taken}
