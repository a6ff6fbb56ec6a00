"""SWA: step as the base does, and keep the average of the weights over steps.

Izmailov, Podoprikhin, Garipov, Vetrov, Wilson: Averaging Weights Leads to Wider Optima and Better
Generalization (UAI 2018), section 3.1, algorithm 1. Reference implementations: timgaripov/swa and
`torch.optim.swa_utils`, whose running mean this is.

Where we differ: averaging counts steps, not epochs. The learning rate stays the schedule's; if it ends at 0,
the last weights count most. The average is float32 or wider.
"""

from mergekit_lab.optim.averaging import Averaging
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters
from mergekit_lab.ranges import Count, Proportion


class SWA(Averaging):
    """Stochastic weight averaging around any base optimizer. One evaluation per step.

    It starts in eval mode, where the weights between steps are the average; see `Averaging`.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        steps: number of planned steps, ≥ 1.
        start: part of `steps` before averaging starts, in [0, 1]. The authors start at 0.75.
        every: steps ≥ 1 between two weights that are averaged.
    """

    recordable = True

    def __init__(
        self,
        named_parameters: Parameters,
        base: BaseOptimizer,
        steps: Count,
        start: Proportion = 0.75,
        every: Count = 1,
    ) -> None:
        self.begin(steps, start, every)
        super().__init__(named_parameters, base)
