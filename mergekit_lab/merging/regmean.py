"""RegMean: the linear layer whose outputs are nearest to each expert's on that expert's inputs.

Jin et al. 2023, "Dataless knowledge fusion by merging weights of language models", section 3.2. With the
inputs `X_t` of a layer at expert t and `G_t = X_tᵀX_t`, the least-squares solution for weights `[out, in]`
is `Wᵀ = (Σ G_t)⁻¹ Σ G_t W_tᵀ`; off-diagonal entries of `G_t` are shrunk by a factor.

Reference: yule-BUAA/MergeLM (`merging_with_regmean_weights`), whose Grams are means over the rows of `X_t`;
a common scale changes nothing, different scales weigh the experts. It inverts whatever it gets; here a sum
of Grams that is singular, to the precision of the data, is an error that names the tensor.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Method, Site
from mergekit_lab.ranges import Magnitude, Proportion

_SUFFIXES = (".weight", "_weight")


@dataclass(frozen=True, kw_only=True)
class RegMean(Method):
    """`(Σ λ_t G_t)⁻¹ Σ λ_t G_t W_tᵀ` for weights with a Gram, the mean for other tensors.

    Args:
        ratio: factor of the Grams' off-diagonal entries, in [0, 1]; 0 weighs input by input.
        ridge: ≥ 0; this times the averaged Grams' mean diagonal entry is added to each diagonal. A large ridge
            gives the mean.
        weights: `λ_t` scales `G_t` (and `δ_t` in the mean), 1 by default.

    Needs `statistics={"gram": …}`: one checkpoint per expert that holds, under the name of a linear module
    (`mlp.c_fc` for `mlp.c_fc.weight`, `attn.in_proj` for `attn.in_proj_weight`), its `[in, in]` Gram, as
    `curvature.input_grams` makes them. Equal Grams give the mean; one expert is itself.

    Raises:
        InputError: at the merge, a Gram that does not fit its weight, or a sum of Grams that is singular.
    """

    ratio: Proportion = 1.0
    ridge: Magnitude = 0.0

    side_inputs: ClassVar[tuple[str, ...]] = ("gram",)
    by_matrix = True

    def name_side(self, kind: str, name: str) -> str | None:
        return name_gram(name)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        if self.side_inputs[0] not in site.side or base.dim() == 1:
            return site.weigh(deltas).mean(dim=0)
        total, pull = self._build_equations(name, site.orient(deltas), site)
        precision = 1e-12 if deltas.dtype == torch.float64 else 1e-6
        return site.orient(_solve(total, pull, precision, name).mT).to(deltas.dtype)

    def _build_equations(self, name: str, weights: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        """`ΣG'_t` `[in, in]` and `ΣG'_t δ_tᵀ` `[in, out]` for `weights` `δ` `[T, out, in]`, in float64."""
        grams = site.side[self.side_inputs[0]]
        inputs = weights.shape[-1] if weights.dim() == 3 else None
        if grams.shape[1:] != (inputs, inputs):
            layout = "[in, out]" if site.transposed else "[out, in]"
            raise InputError(
                f"the gram of {name!r} is {list(grams.shape[1:])} and the tensor "
                f"{list(site.orient(weights).shape[1:])}; a weight {layout} takes a gram [in, in]"
            )
        total = torch.zeros_like(grams[0], dtype=torch.float64)
        pull = total.new_zeros(weights.shape[-1], weights.shape[-2])
        mean = grams.diagonal(dim1=-2, dim2=-1).double().mean()
        for gram, delta, weight in zip(grams, weights, site.weights.double(), strict=True):
            own = self._shrink(gram, mean).mul_(weight)  # one expert at a time in float64
            total += own
            pull.addmm_(own, delta.double().mT)
            del own
        return total, pull

    def _shrink(self, gram: Tensor, mean: Tensor) -> Tensor:
        """`G'_t` `[in, in]` in float64: off-diagonal entries times the ratio, the ridge times `mean` on the
        diagonal."""
        shrunk = gram.to(torch.float64, copy=True)
        diagonal = shrunk.diagonal() * (1 - self.ratio) + self.ridge * mean
        shrunk.mul_(self.ratio).diagonal().add_(diagonal)
        return shrunk


def name_gram(name: str) -> str | None:
    """The name of a weight's Gram in a checkpoint of Grams; None if it cannot have one."""
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), None)


def _solve(gram: Tensor, pull: Tensor, precision: float, name: str) -> Tensor:
    """`gram⁻¹ pull` by Cholesky, after scaling to a unit diagonal; both are overwritten.

    A squared pivot of the scaled factor is the share of an input's energy that the inputs before it do not
    explain; where that is under `precision` the weights of that input are undetermined.
    """
    scale = gram.diagonal().sqrt()
    dead = int((~(scale > 0)).sum())
    if dead == 0:
        factor, failed = torch.linalg.cholesky_ex(gram.div_(scale[:, None]).div_(scale))
        if not int(failed) and float(factor.diagonal().min()) ** 2 > precision:
            return torch.cholesky_solve(pull.div_(scale[:, None]), factor).div_(scale[:, None])
    what = f"{dead} inputs have no positive energy" if dead else "some inputs are combinations of others"
    raise InputError(
        f"the summed grams of {name!r} are singular ({what}): give more samples, or set ratio below 1 or "
        "ridge above 0"
    )
