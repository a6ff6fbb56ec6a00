"""Curvature of a task's loss, as checkpoints that merging can read."""

from mergekit_lab.curvature.fisher import diagonal_fisher
from mergekit_lab.curvature.gram import input_grams

__all__ = ["diagonal_fisher", "input_grams"]
