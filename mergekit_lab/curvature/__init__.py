"""Curvature of a task's loss, as checkpoints that merging can read."""

from mergekit_lab.curvature.fisher import diagonal_fisher

__all__ = ["diagonal_fisher"]
