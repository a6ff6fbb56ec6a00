"""RegMean++: RegMean whose Grams are taken in the merged model, layer after layer.

Nguyen et al. 2025, "RegMean++: enhancing effectiveness and generalization of regression mean for model
merging", section 3; reference: nthehai01/RegMean-plusplus. The arithmetic is RegMean's; the Grams depend on the
experts, their order of layers and the method, so they are made for one merge, by `curvature.chained_grams`.
"""

from dataclasses import dataclass
from typing import ClassVar

from mergekit_lab.merging.regmean import RegMean
from mergekit_lab.ranges import Proportion


@dataclass(frozen=True, kw_only=True)
class RegMeanPlusPlus(RegMean):
    """`(Σ λ_t G_t)⁻¹ Σ λ_t G_t W_tᵀ` with the Grams of every layer on the merged layers' outputs before it.

    Args:
        ratio: as RegMean's; the authors' 0.95.
        ridge, weights: as RegMean's.

    Needs `statistics={"chained_gram": …}`: what `curvature.chained_grams` returns for these experts and this
    method. A run makes them itself.
    """

    ratio: Proportion = 0.95

    side_inputs: ClassVar[tuple[str, ...]] = ("chained_gram",)
