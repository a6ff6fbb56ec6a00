"""Merge experts of one base. Torch and the checkpoint room only: usable from anybody's code.

```python
from mergekit_lab.merging import TIES, merge_state_dicts

merged = merge_state_dicts(base, {"cars": cars, "dtd": dtd}, TIES(density=0.2))
```
"""

from mergekit_lab.merging.adamerging import AdaMerging, Learning, learn_coefficients
from mergekit_lab.merging.arcee_fusion import ArceeFusion
from mergekit_lab.merging.average import WeightAverage
from mergekit_lab.merging.breadcrumbs import Breadcrumbs
from mergekit_lab.merging.cat import CAT
from mergekit_lab.merging.consensus import ConsensusTA
from mergekit_lab.merging.contract import Method, ScaledMethod, Site, Stream
from mergekit_lab.merging.core_space import CoreSpace
from mergekit_lab.merging.dare import DARE
from mergekit_lab.merging.della import DELLA
from mergekit_lab.merging.devices import resolve_device
from mergekit_lab.merging.doge import DOGE
from mergekit_lab.merging.emr import EMR
from mergekit_lab.merging.epimer import EpiMer
from mergekit_lab.merging.fisher import Fisher
from mergekit_lab.merging.iso import IsoC, IsoCTS
from mergekit_lab.merging.karcher import Karcher
from mergekit_lab.merging.knots import KnOTS
from mergekit_lab.merging.lines import LiNeS
from mergekit_lab.merging.localize_stitch import Localization, LocalizeStitch, learn_masks
from mergekit_lab.merging.low_rank import merge_factors, plan_factors, require_factors
from mergekit_lab.merging.model_stock import ModelStock
from mergekit_lab.merging.multislerp import MultiSLERP
from mergekit_lab.merging.nearswap import NearSwap
from mergekit_lab.merging.nuslerp import NuSLERP
from mergekit_lab.merging.passthrough import Passthrough
from mergekit_lab.merging.pcb import PCB
from mergekit_lab.merging.ram import RAM
from mergekit_lab.merging.regmean import RegMean
from mergekit_lab.merging.regmean_plusplus import RegMeanPlusPlus
from mergekit_lab.merging.sce import SCE
from mergekit_lab.merging.slerp import SLERP
from mergekit_lab.merging.sparsified import SparsifiedMethod, WrappingMethod
from mergekit_lab.merging.spectral import AtomMethod, LayerWeightsMethod, SpectralMethod
from mergekit_lab.merging.stream import merge_state_dicts, merge_tensors
from mergekit_lab.merging.subspace import SubspaceMethod
from mergekit_lab.merging.task_arithmetic import TaskArithmetic
from mergekit_lab.merging.ties import TIES
from mergekit_lab.merging.tsvc import TSVC
from mergekit_lab.merging.tsvm import TSVM
from mergekit_lab.merging.wudi import WUDI

__all__ = [
    "CAT",
    "DARE",
    "DELLA",
    "DOGE",
    "EMR",
    "PCB",
    "RAM",
    "SCE",
    "SLERP",
    "TIES",
    "TSVC",
    "TSVM",
    "WUDI",
    "AdaMerging",
    "ArceeFusion",
    "AtomMethod",
    "Breadcrumbs",
    "ConsensusTA",
    "CoreSpace",
    "EpiMer",
    "Fisher",
    "IsoC",
    "IsoCTS",
    "Karcher",
    "KnOTS",
    "LayerWeightsMethod",
    "Learning",
    "LiNeS",
    "Localization",
    "LocalizeStitch",
    "Method",
    "ModelStock",
    "MultiSLERP",
    "NearSwap",
    "NuSLERP",
    "Passthrough",
    "RegMean",
    "RegMeanPlusPlus",
    "ScaledMethod",
    "Site",
    "SparsifiedMethod",
    "SpectralMethod",
    "Stream",
    "SubspaceMethod",
    "TaskArithmetic",
    "WeightAverage",
    "WrappingMethod",
    "learn_coefficients",
    "learn_masks",
    "merge_factors",
    "merge_state_dicts",
    "merge_tensors",
    "plan_factors",
    "require_factors",
    "resolve_device",
]
