"""WASAM: step as SAM does, and keep the average of the weights over steps.

Kaddour, Liu, Silva, Kusner: When Do Flat Minima Optimizers Work? (NeurIPS 2022), section 3.3. Reference
implementation: JeanKaddour/WASAM, `WASAM`.

Where we differ: as in sam.py and swa.py.
"""

from mergekit_lab.optim.averaging import Averaging
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters
from mergekit_lab.optim.sam import SAM
from mergekit_lab.ranges import Count, NotNegative, Proportion, Share


class WASAM(Averaging, SAM):
    """SAM with averaged weights around any base optimizer. Two evaluations per step.

    It starts in eval mode, where the weights between steps are the average; see `Averaging`.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        steps: number of planned steps, ≥ 1.
        rho: radius ρ ≥ 0 of SAM's ball; 0 is SWA.
        start: part of `steps` before averaging starts, in [0, 1].
        every: steps ≥ 1 between two weights that are averaged.
        ascent_fraction, sync_ascent: see `AscentOptimizer`.
    """

    recordable = True

    def __init__(
        self,
        named_parameters: Parameters,
        base: BaseOptimizer,
        steps: Count,
        rho: NotNegative = 0.05,
        start: Proportion = 0.75,
        every: Count = 1,
        ascent_fraction: Share = 1.0,
        sync_ascent: bool = True,
    ) -> None:
        self.begin(steps, start, every)
        super().__init__(named_parameters, base, rho, ascent_fraction, sync_ascent)
