"""mergekit's recipes: `reader.py` the YAML, `parameters.py` its values by tensor, `methods.py` what merges."""

from mergekit_lab.commands.recipes.reader import read_recipe
from mergekit_lab.commands.recipes.recipe import Recipe

__all__ = ["Recipe", "read_recipe"]
