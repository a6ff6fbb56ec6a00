"""SWA: step as the base does, keep the average of the weights passed through.

Izmailov, Podoprikhin, Garipov, Vetrov, Wilson: Averaging Weights Leads to Wider Optima and Better
Generalization (UAI 2018), section 3.1, algorithm 1. Reference implementations: timgaripov/swa and
`torch.optim.swa_utils`, whose running mean this is.

Where we differ: averaging goes by steps, not epochs; the learning rate is the schedule's own, and a schedule
that ends at 0 makes the last weights count most. The average is kept in float32 at least.
"""

from mergekit_lab.optim.averaging import Averaging
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters


class SWA(Averaging):
    """Stochastic weight averaging around any base optimizer. One evaluation a step.

    In eval mode, where it starts, the weights between steps are the average; see `Averaging`.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        steps: how many steps are planned, ≥ 1.
        start: part of `steps`, in [0, 1], before the first average. The authors start at 0.75.
        every: steps ≥ 1 between two weights that are averaged.

    Raises:
        InputError: a hyper-parameter out of range; `step()` in eval mode without a closure; a sparse
            gradient.
    """

    recordable = True

    def __init__(
        self, named_parameters: Parameters, base: BaseOptimizer, steps: int, start: float = 0.75, every: int = 1
    ) -> None:
        self.begin(steps, start, every)
        super().__init__(named_parameters, base)
