"""mergekit's recipes: `reader.py` the YAML, `parameters.py` its values by tensor, `methods.py` what merges."""

from mergekit_lab.commands.recipes.reader import Recipe, read_recipe

__all__ = ["Recipe", "read_recipe"]
