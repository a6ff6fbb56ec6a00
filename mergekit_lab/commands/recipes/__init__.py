"""mergekit's recipes, from `documents.py`, their file, to `methods.py`, what merges."""

from mergekit_lab.commands.recipes.documents import read_recipe
from mergekit_lab.commands.recipes.recipe import Recipe

__all__ = ["Recipe", "read_recipe"]
