"""Merge experts of one base. Torch and the checkpoint room only: usable from anybody's code.

from mergekit_lab.merging import TIES, merge_state_dicts
merged = merge_state_dicts(base, {"cars": cars, "dtd": dtd}, TIES(density=0.2))
"""

from mergekit_lab.merging.average import WeightAverage
from mergekit_lab.merging.contract import Method, ScaledMethod, Site, Stream
from mergekit_lab.merging.dare import DARE
from mergekit_lab.merging.epimer import EpiMer
from mergekit_lab.merging.fisher import Fisher
from mergekit_lab.merging.stream import merge_state_dicts, merged_tensors
from mergekit_lab.merging.task_arithmetic import TaskArithmetic
from mergekit_lab.merging.ties import TIES
from mergekit_lab.merging.tsvm import TSVM

__all__ = [
    "DARE",
    "TIES",
    "TSVM",
    "EpiMer",
    "Fisher",
    "Method",
    "ScaledMethod",
    "Site",
    "Stream",
    "TaskArithmetic",
    "WeightAverage",
    "merge_state_dicts",
    "merged_tensors",
]
