"""A recipe as it was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mergekit_lab.checkpoints import Checkpoint
from mergekit_lab.checkpoints.vocabulary_rows import TokenPlan
from mergekit_lab.commands.recipes.methods import PerTensor
from mergekit_lab.commands.recipes.parameters import RecipeParameters


@dataclass(frozen=True)
class Recipe:
    """A recipe as arguments of `prepare`.

    Attributes:
        base: the base model; for `linear` without one, the first model.
        experts: by the names they have in the recipe.
        settings: where parameters come from.
        dtype: of what is written.
        embeddings, tokenizer_from: what `tokenizer_source` asks for.
        tokens: how vocabularies are made one; None where the recipe names no tokenizer.
        chat_template: in Jinja; None keeps the tokenizer's own.
        notes: what of it has no effect here.
        text: the YAML as it was.
        documents: merges that are made first, by name, each after those that it needs.
    """

    base: Any
    experts: Mapping[str, Any]
    settings: RecipeParameters
    dtype: str | None
    embeddings: str | None
    tokenizer_from: str | None
    chat_template: str | None
    notes: Sequence[str]
    text: str
    tokens: TokenPlan | None = None
    documents: Mapping[str, Recipe] = field(default_factory=dict)

    def make_method(self, base: Checkpoint) -> PerTensor:
        """The method for a model with these tensors."""
        entries = {name: spec.numel for name, spec in base.specs.items() if spec.dtype.is_floating_point}
        return self.settings.make_method(entries)
