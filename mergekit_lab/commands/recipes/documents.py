"""A file of mergekit recipes: one document, or several that use each other's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergekit_lab.commands.recipes.reader import RecipeReader
from mergekit_lab.commands.recipes.recipe import Recipe
from mergekit_lab.errors import InputError, join_names, name_in_errors
from mergekit_lab.yaml_files import make_values, read_yaml_text


def read_recipe(file: Path, seed: int = 0, folder: Path | None = None) -> Recipe:
    """Read a mergekit YAML.

    Args:
        file: one document, or several that use each other's results by `name`; the one that no other uses is
            the recipe, the others are its `documents`.
        seed: of random masks.
        folder: where the results of its documents will be, by name. None: each is taken for its base, which has
            the same tensors.

    Raises:
        InputError: it is none, or asks for something that is not done here, by name.
    """
    try:
        text = read_yaml_text(file)
    except OSError as error:
        raise InputError(f"recipe={file} cannot be read ({error.strerror})") from None
    documents = make_values(text, f"recipe={file}")
    for number, document in enumerate(documents or [None], start=1):
        if not isinstance(document, dict) or "merge_method" not in document:
            which = f"document {number} of recipe={file}" if len(documents) > 1 else f"recipe={file}"
            raise InputError(f"{which} is not a mergekit recipe: it has no merge_method{_explain(document)}")
    with name_in_errors(str(file)):
        if len(documents) == 1:
            return RecipeReader(documents[0], {}).read_recipe(text, seed)
        return _read_documents(documents, text, seed, folder)


def _explain(document: Any) -> str:
    """What a YAML is that other programs of mergekit read."""
    keys = set(document) if isinstance(document, Mapping) else set()
    if {"gate_mode", "experts"} & keys:
        return "; mixtures of experts from dense models are not made here"
    if "genome" in keys:
        return "; weights are searched in a run, by search=evolve"
    return ""


def _read_documents(
    documents: Sequence[Mapping[str, Any]], text: str, seed: int, folder: Path | None
) -> Recipe:
    """Several documents, in the order in which they can be run."""
    named: dict[str, Mapping[str, Any]] = {}
    for number, document in enumerate(documents):
        name = str(document.get("name") or f"document {number + 1}")
        if name in named:
            raise InputError(f"two documents have the name {name!r}")
        if document.get("name") and Path(name).name != name:
            raise InputError(f"the name {name!r} of a document is not a plain name")
        named[name] = document
    sources: dict[str, Any] = {name: name for name in named}
    needs = {name: RecipeReader(document, sources).list_used() for name, document in named.items()}
    last = [name for name in named if not any(name in others for others in needs.values())]
    if len(last) != 1:
        ends = f"{join_names(last)} are used by no other" if last else "they use each other in a circle"
        raise InputError(f"of several documents one must be the result, and {ends}")
    done: dict[str, Recipe] = {}
    while len(done) < len(named):
        ready = [name for name in named if name not in done and needs[name] <= done.keys()]
        if not ready:
            raise InputError(f"documents use each other in a circle ({join_names(named.keys() - done)})")
        for name in ready:
            made = {n: r.base if folder is None else str(folder / n) for n, r in done.items()}
            done[name] = RecipeReader(named[name], made).read_recipe(text, seed)
    recipe = done.pop(last[0])
    notes = [*recipe.notes, *(f"{name}: {note}" for name, document in done.items() for note in document.notes)]
    return replace(recipe, documents=done, notes=notes)
