"""Optimizers for experts that will be merged: torch only, each usable in anybody's training loop.

A method here says where the gradient is taken; a base optimizer (any `torch.optim.Optimizer`) says what is
done with it. `wrapper.py` holds what they share, one file each holds the rest; `docs/optimizers.md` shows
how to add one.
"""

from mergekit_lab.optim.asam import ASAM
from mergekit_lab.optim.mergopt import MergOPT
from mergekit_lab.optim.sam import SAM

__all__ = ["ASAM", "SAM", "MergOPT"]
