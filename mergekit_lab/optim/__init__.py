"""Optimizers for experts that will be merged: torch only, each usable in anybody's training loop.

A method decides where the gradient is taken. A base optimizer (any `torch.optim.Optimizer`) decides what to do
with it. `wrapper.py` has what methods share, and `ascent.py`, `offset.py` and `averaging.py` have the kinds of
step. Every method has a file. `docs/optimizers.md` shows how to add one.
"""

from mergekit_lab.optim.asam import ASAM
from mergekit_lab.optim.checks import count_gradient_evaluations, refuse_accumulation
from mergekit_lab.optim.fit import OffsetFit, fit_offset
from mergekit_lab.optim.friendly_sam import FriendlySAM
from mergekit_lab.optim.mergopt import MergOPT
from mergekit_lab.optim.pgn import PGN
from mergekit_lab.optim.rwp import RWP
from mergekit_lab.optim.sagm import SAGM
from mergekit_lab.optim.sam import SAM
from mergekit_lab.optim.ssam import SSAMD, SSAMF
from mergekit_lab.optim.swa import SWA
from mergekit_lab.optim.wasam import WASAM

__all__ = [
    "ASAM",
    "PGN",
    "RWP",
    "SAGM",
    "SAM",
    "SSAMD",
    "SSAMF",
    "SWA",
    "WASAM",
    "FriendlySAM",
    "MergOPT",
    "OffsetFit",
    "count_gradient_evaluations",
    "fit_offset",
    "refuse_accumulation",
]
