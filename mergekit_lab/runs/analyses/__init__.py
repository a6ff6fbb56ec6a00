"""What the stage `analyze` can do, one frozen dataclass each; the group `analysis` names them."""

from mergekit_lab.runs.analyses.ablations import FinetuningSteps, FisherFraction
from mergekit_lab.runs.analyses.contract import Analysis, Drawing, OnSamples, compute_each, describe_experts
from mergekit_lab.runs.analyses.paths import AlphaSweep, HessianPath, JointTaskLinearity, LossBarrier
from mergekit_lab.runs.analyses.planes import Disentanglement, ExpertCloud, Landscape
from mergekit_lab.runs.analyses.sweeps import CurvatureGain, ExpertCount, RankSweep
from mergekit_lab.runs.analyses.vectors import CrossTaskLinearity, EntryDistribution, TaskVectors

__all__ = [
    "AlphaSweep",
    "Analysis",
    "CrossTaskLinearity",
    "CurvatureGain",
    "Disentanglement",
    "Drawing",
    "EntryDistribution",
    "ExpertCloud",
    "ExpertCount",
    "FinetuningSteps",
    "FisherFraction",
    "HessianPath",
    "JointTaskLinearity",
    "Landscape",
    "LossBarrier",
    "OnSamples",
    "RankSweep",
    "TaskVectors",
    "compute_each",
    "describe_experts",
]
