"""What the stage `analyse` can do, one frozen dataclass each; the group `analysis` names them."""

from mergekit_lab.stages.analyses.contract import Analysis
from mergekit_lab.stages.analyses.paths import AlphaSweep, HessianPath, LossBarrier
from mergekit_lab.stages.analyses.planes import Disentanglement, Landscape
from mergekit_lab.stages.analyses.vectors import CrossTaskLinearity, TaskVectors

__all__ = [
    "AlphaSweep",
    "Analysis",
    "CrossTaskLinearity",
    "Disentanglement",
    "HessianPath",
    "Landscape",
    "LossBarrier",
    "TaskVectors",
]
