"""Inspect the inputs of a merge only by headers and configurations: no tensor's data is read."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mergekit_lab.checkpoints.adapters import Folded, find_adapter
from mergekit_lab.checkpoints.align import list_computed_buffers
from mergekit_lab.checkpoints.checkpoint import Checkpoint, TensorSpec
from mergekit_lab.checkpoints.hub import RemoteHeaders
from mergekit_lab.checkpoints.tied_weights import (
    find_configured_groups,
    is_tying_embeddings,
    read_config,
    read_vocabulary_size,
)
from mergekit_lab.checkpoints.tokens import read_tokens
from mergekit_lab.errors import join_names, say_bytes

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass
class Report:
    """Lines for readers, and problems that prevent the merge.

    Attributes:
        lines: the report, without the problems.
        problems: why the merge would fail; empty if it would not.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def works(self) -> bool:
        return not self.problems

    def format_text(self) -> str:
        """The report with problems and verdict, for a terminal."""
        end = [f"PROBLEM: {problem}" for problem in self.problems]
        end += ["The merge would not work." if end else "The merge would work."]
        return "\n".join([*self.lines, *end])

    def add_section(self, title: str, lines: Iterable[str]) -> None:
        """Add a title and the lines below it."""
        self.lines += [title, *(f"  {line}" for line in lines)]


def describe_inputs(base: Checkpoint, experts: Mapping[str, Checkpoint]) -> list[str]:
    """One line a checkpoint: tensors, parameters, dtypes, files, vocabulary; an adapter's targets."""
    lines = []
    for name, checkpoint in [("base", base), *experts.items()]:
        lines.append(f"{name}: {_describe_sizes(checkpoint)}; {_describe_storage(checkpoint)}")
        lines += [f"  {line}" for line in _describe_vocabulary(checkpoint)]
        adapter = find_adapter(checkpoint)
        if adapter is not None:
            lines += [f"  {line}" for line in _describe_targets(adapter)]
    return lines


def _describe_sizes(checkpoint: Checkpoint) -> str:
    specs = checkpoint.specs.values()
    dimensions = Counter(len(spec.shape) for spec in specs)
    dtypes = Counter(str(spec.dtype).removeprefix("torch.") for spec in specs)
    shapes = ", ".join(f"{n} {d}-D" for d, n in sorted(dimensions.items()))
    kinds = ", ".join(f"{n} {dtype}" for dtype, n in dtypes.items())
    return f"{len(specs)} tensors ({shapes}), {sum(s.numel for s in specs) / 1e6:,.2f} M entries, {kinds}"


def _describe_storage(checkpoint: Checkpoint) -> str:
    if checkpoint.files:
        size = sum(os.path.getsize(file) for file in checkpoint.files)
        return f"{len(checkpoint.files)} files, {say_bytes(size)}"
    size = sum(spec.nbytes for spec in checkpoint.specs.values())
    where = "on the hub, not downloaded" if isinstance(checkpoint, RemoteHeaders) else "in memory"
    return f"{say_bytes(size)} {where}"


def _describe_vocabulary(checkpoint: Checkpoint) -> list[str]:
    size, tokens = read_vocabulary_size(read_config(checkpoint.folder)), read_tokens(checkpoint.folder)
    if size is None and tokens is None:
        return []
    known = "no tokenizer that can be read" if tokens is None else f"{len(tokens)} tokens in the tokenizer"
    return [f"vocabulary: {size if size is not None else 'not configured'}, {known}"]


def _describe_targets(adapter: Folded) -> list[str]:
    kinds = Counter(name.removesuffix(".weight").split(".")[-1] for name in adapter.targets)
    ranks = sorted(set(adapter.targets.values()))
    kind = "DoRA" if adapter.dora else "rsLoRA" if adapter.rslora else "LoRA"
    lines = [
        f"{kind} of rank {', '.join(map(str, ranks)) or 'none'} on {len(adapter.targets)} tensors: "
        + ", ".join(f"{n} × {name}" for name, n in kinds.most_common())
    ]
    if adapter.replaced:
        lines.append(f"saved whole: {join_names(adapter.replaced)}")
    if adapter.base_name:
        lines.append(f"trained on {os.path.basename(adapter.base_name.rstrip('/'))}")
    return lines


def describe_model(base: Checkpoint) -> list[str]:
    """Tied weights and buffers of the base."""
    config = read_config(base.folder)
    tie = {True: "tied by the configuration", False: "not tied", None: "no configuration says"}[
        is_tying_embeddings(config)
    ]
    double = "; ".join(join_names(group) for group in find_configured_groups(base))
    lines = [
        f"input and output embeddings: {tie}"
        + (f"; under several names in the files: {double}" if double else "")
    ]
    computed = list_computed_buffers(base)
    if computed:
        lines.append(
            f"{len(computed)} buffers that the model computes, copied whatever experts have: "
            f"{join_names(computed)}"
        )
    buffers = [n for n, spec in base.specs.items() if not spec.dtype.is_floating_point and n not in computed]
    if buffers:
        lines.append(
            f"{len(buffers)} integer buffers, copied; the experts' must be equal (batch norm's counters "
            f"excepted): {join_names(buffers)}"
        )
    return lines


def describe_tensors(base: Checkpoint) -> list[str]:
    """Names, shapes and dtypes. Names that differ only in numbers share a line, `layers.*.w`."""
    alike = Counter((_NUMBER.sub("*", name), spec) for name, spec in base.specs.items())
    return [
        f"{name}: {' × '.join(map(str, spec.shape)) or 'a number'}, {str(spec.dtype).removeprefix('torch.')}"
        + (f" ({count} of them)" if count > 1 else "")
        for (name, spec), count in alike.items()
    ]


def list_mismatches(base: Mapping[str, TensorSpec], specs: Mapping[str, TensorSpec]) -> list[str]:
    """Every way in which names, shapes and kinds differ from the base's."""
    missing, extra = base.keys() - specs.keys(), specs.keys() - base.keys()
    pairs = [(name, specs[name], base[name]) for name in base if name in specs]
    faults = {
        f"lacks {len(missing)} tensors the base has": missing,
        f"has {len(extra)} tensors the base lacks": extra,
        "has other shapes": [
            f"{name} {list(own.shape)} where the base has {list(wanted.shape)}"
            for name, own, wanted in pairs
            if own.shape != wanted.shape
        ],
        "has other kinds of numbers": [
            f"{name} {own.dtype} where the base has {wanted.dtype}"
            for name, own, wanted in pairs
            if own.dtype.is_floating_point != wanted.dtype.is_floating_point
        ],
    }
    return [f"{what} ({join_names(names)})" for what, names in faults.items() if names]


def plan_specs(
    base: Checkpoint, dtype: torch.dtype | None = None, left_out: Sequence[str] = ()
) -> dict[str, TensorSpec]:
    """What a merge into `dtype` writes, in the base's order; `left_out` are second names of tied weights."""

    def convert(spec: TensorSpec) -> TensorSpec:
        return TensorSpec(spec.shape, dtype) if dtype and spec.dtype.is_floating_point else spec

    return {name: convert(spec) for name, spec in base.specs.items() if name not in left_out}
