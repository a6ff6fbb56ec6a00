"""LiNeS: scale what another method merges by depth, little in the first layer and much in the last.

Wang et al. 2025, "LiNeS: post-training layer scaling prevents forgetting and enhances model merging", section
4; reference: wang-kee/LiNeS (`src/eval/eval.py`). Layer `l` of `L` is scaled by `a + b·l/(L−1)`, and a tensor
outside layers by `a`. For merges the authors take `a = ‖Σ δ_t‖₁ / (T·‖τ‖₁)`, with `τ` the merged task vector at
coefficient 1, and search `b` on validation. The first number in a tensor's name is its layer. Each stack of
layers has its own `L`, such as the two towers of a CLIP.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.checkpoints import count_layers, split_layer
from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Site, Stream
from mergekit_lab.merging.sparsified import SparsifiedMethod
from mergekit_lab.merging.task_arithmetic import TaskArithmetic


@dataclass(frozen=True, kw_only=True)
class LiNeS(SparsifiedMethod):
    """`θ0 + α(a + b·l/(L−1))·inner(δ)` in layer `l` of `L`.

    Args:
        first: `a`, the factor of the first layer and of tensors outside layers. None takes the authors' rule,
            which needs an inner method that merges entry by entry without a pass over the tensor.
        slope: `b`, how much larger the last layer's factor is; the paper's grid is 0.1, 0.2, … 1.
        inner: the method that merges; coefficient, weights and side inputs are its own. The paper's rule is
            meant for a coefficient of 1.

    Raises:
        InputError: at the merge, a rule that the inner method does not allow.
    """

    first: float | None = None
    slope: float = 0.3

    by_blocks = True
    by_entries = True
    pools = False

    def sparsify(self, name: str, deltas: Tensor, site: Site) -> Tensor:
        return deltas

    def survey(self, stream: Stream) -> tuple[Any, float, dict[str, int]]:
        """The inner method's, the factor of the first layer, and how many layers each stack of them has."""
        inner = super().survey(stream)
        first = self._balance(stream, inner) / len(stream.experts) if self.first is None else self.first
        return inner, first, count_layers(stream.names)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        survey, factor, layers = site.survey
        if parsed := split_layer(name):
            last = layers[parsed.stack] - 1
            factor += self.slope * (parsed.layer / last if last else 1.0)
        elif not layers:
            site.note("lines", "no layers in the names: scaled as the first layer")
        return super().merge(name, base, deltas, replace(site, survey=survey)) * factor

    def _balance(self, stream: Stream, survey: Any) -> float:
        """`‖Σ δ_t‖₁ / ‖τ‖₁`."""
        inner = self.inner
        if isinstance(inner, TaskArithmetic) and inner.weights is None and inner.weigh_experts(("",)) == [1.0]:
            return 1.0
        if not inner.pools or inner.side_inputs:
            raise InputError(
                f"first=null needs the norm of {type(inner).__name__}'s result, which is not known in advance: "
                "give first=<1 / number of experts>"
            )
        norms = torch.zeros(2, dtype=torch.float64)
        for name, deltas, site in stream.read_blocks():
            merged = inner.merge(name, torch.zeros_like(deltas[0]), deltas, replace(site, survey=survey))
            norms += torch.stack([x.abs().sum(dtype=torch.float64).cpu() for x in (deltas.sum(dim=0), merged)])
        return float(norms[0] / norms[1]) if norms[1] > 0 else 1.0
