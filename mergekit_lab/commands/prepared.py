"""The opened inputs of a merge of checkpoints, and the plan of the files that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch

from mergekit_lab.checkpoints import TRANSFORMERS, Checkpoint, TensorSpec
from mergekit_lab.checkpoints.inspection import plan_specs
from mergekit_lab.checkpoints.layers import LayerRange
from mergekit_lab.checkpoints.libraries import Library, find_library
from mergekit_lab.checkpoints.tied_weights import read_config
from mergekit_lab.merging import Method
from mergekit_lab.merging.inputs import Source


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter on another model than the base of the merge."""

    model: Source | Arranged
    adapter: str | Path


@dataclass(frozen=True)
class Arranged:
    """A model put together from layers of others. The first gives the configuration and the tokenizer.

    Attributes:
        pieces: in the order of the result's layers, of models that are not open.
    """

    pieces: tuple[LayerRange, ...]


@dataclass(frozen=True)
class Prepared:
    """Opened and reconciled inputs, and how to merge them.

    Attributes:
        base, experts: under one set of names, with one vocabulary.
        side: side inputs by kind and expert.
        include, exclude: name patterns, as they were given.
        kept: names that stay the base's for other reasons: buffers that are computed, `embeddings=base`.
        vocabulary: rows of the embedding, where they are not the base's.
        tokenizer: the folder that the tokenizer comes from.
        added_tokens: entries that its `tokenizer.json` gets besides its own.
        tokenizer_source: what the card calls that.
        chat_template: in Jinja, in place of the tokenizer's own.
        origin, opened: the same as they were opened, before their vocabularies were made one.
        base_source, sources: what the card calls each input.
        notes: what was done to the inputs.
        problems: why they cannot be merged, where only headers were asked for.
    """

    base: Checkpoint
    experts: Mapping[str, Checkpoint]
    origin: Checkpoint
    opened: Mapping[str, Checkpoint]
    side: Mapping[str, Mapping[str, Checkpoint]]
    method: Method
    device: Sequence[str]
    dtype: torch.dtype | None
    include: Sequence[str] | None
    exclude: Sequence[str]
    kept: Sequence[str]
    embeddings: str | None
    max_shard_bytes: int
    vocabulary: int | None
    tokenizer: Path | None
    tokenizer_source: str
    chat_template: str | None
    base_source: str
    sources: Mapping[str, str]
    notes: Sequence[str]
    problems: Sequence[str] = ()
    added_tokens: Sequence[Mapping[str, Any]] = ()

    @property
    def library(self) -> Library | None:
        """The library that loads the result."""
        return find_library(self.base)

    @property
    def dtype_name(self) -> str | None:
        """The name of the dtype that the result is stored in. None keeps each tensor's own."""
        return None if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @property
    def left_out(self) -> list[str]:
        """Name patterns of all tensors that are not merged."""
        return [*self.exclude, *(escape(name) for name in self.kept)]


def plan_output(
    base: Checkpoint, dtype: torch.dtype | None, left_out: Sequence[str], max_shard_bytes: int
) -> tuple[dict[str, TensorSpec], int, str]:
    """Plan the files of a model with the base's tensors, so that the base's library loads them: transformers'
    without second names of tied weights, open_clip's in one file, diffusers' under its own name."""
    library = find_library(base)
    specs = plan_specs(base, dtype, left_out if library is TRANSFORMERS else ())
    if library is not None and not library.sharded:
        max_shard_bytes = max(1, sum(spec.nbytes for spec in specs.values()))
    stem = (library or TRANSFORMERS).stem
    if library is TRANSFORMERS and _DIFFUSERS_KEY in read_config(base.folder):
        stem = "diffusion_pytorch_model"
    return specs, max_shard_bytes, stem


_DIFFUSERS_KEY = "_class_name"
"""In a `config.json` of diffusers, which looks for no `model.safetensors`."""
