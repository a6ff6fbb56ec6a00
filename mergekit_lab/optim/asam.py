"""ASAM: SAM whose ball is measured in units of each weight's size, so rescaling a layer changes nothing.

Kwon, Kim, Park, Choi: ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep Neural
Networks (ICML 2021), section 3, p = 2. Public code and papers disagree on T and on the norm. Each variant has a
name:

- `samsung`: SamsungLabs/ASAM, `ASAM`: T = |w| + η for parameters whose name contains "weight", 1 for the
  others.
- `saft`: BAIKLAB/SAFT-Merge, `SAM(adaptive=True)`, the same as davda54/sam: T = |w| on every parameter, no η.
- `printed`: Lee et al., Mitigating Parameter Interference in Model Merging via Sharpness-Aware Fine-Tuning
  (ICLR 2025), the formula where it introduces ASAM: ρ w² g / ‖g‖, the norm of the plain gradient.

Where we differ: θ is restored from a copy. Gradients are dropped between the two evaluations. Norms of
low-precision gradients, and products in float16, are computed in float32. `printed` adds 1e-12 to the
denominator, so that g = 0 gives 0.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.optim.ascent import AscentOptimizer
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters, Setting, combine, scale
from mergekit_lab.optim.sharded import compute_global_norm
from mergekit_lab.ranges import NotNegative, Share

ADDED_TO_NORM = {"samsung": 1e-16, "saft": 1e-12, "printed": 1e-12}


def compute_asam_perturbation(
    params: list[Tensor],
    grads: list[Tensor],
    rho: Setting,
    *,
    scaling: str = "samsung",
    eta: Setting = 0.01,
    is_weight: Sequence[bool] = (),
) -> list[Tensor]:
    """e = ρ T² g / ‖T g‖, or ρ T² g / ‖g‖ for `printed`; zero gradients give e = 0.

    Norms are over all tensors together. The head of this file defines T.

    Args:
        params, grads: weights and gradients, pairwise of the same shape, 0-d included. They are not changed.
        rho: radius, in units of T (in `printed`, of weights). One number, or one per parameter. A negative
            radius descends.
        scaling: `samsung`, `saft` or `printed`.
        eta: η ≥ 0, in units of the weights. One number, or one per parameter; only `samsung` uses it.
        is_weight: for `samsung`, which of `params` have T = |w| + η.

    Returns:
        One tensor per parameter, same shapes; float32 if gradients are float16.
    """
    grads = [g.float() if g.dtype is torch.float16 else g for g in grads]
    sizes = torch._foreach_abs(params)
    if scaling == "samsung":
        torch._foreach_add_(sizes, eta)
        for t, chosen in zip(sizes, is_weight, strict=True):
            if not chosen:
                t.fill_(1)
    scaled = list(torch._foreach_mul(grads, sizes))
    norm = compute_global_norm(grads if scaling == "printed" else scaled) + ADDED_TO_NORM[scaling]
    scaled = scale(scaled, combine(lambda each: each / norm, rho))
    torch._foreach_mul_(scaled, sizes)
    return scaled


class ASAM(AscentOptimizer):
    """Adaptive sharpness-aware minimization around any base optimizer. Two evaluations per step.

    Args:
        named_parameters, base: see `WrappedOptimizer`; `samsung` needs names.
        rho: radius ρ ≥ 0; 0 is the base optimizer. SAFT and the ASAM authors use 0.5.
        scaling: `samsung` (the ASAM authors' code), `saft` (what SAFT's code runs) or `printed` (the SAFT
            paper).
        eta: η ≥ 0 added to |w|; only `samsung` uses it.
        ascent_fraction, sync_ascent: see `AscentOptimizer`.

    Raises:
        InputError: `scaling` is unknown; `samsung` without names; a hyper-parameter is out of range; `step` is
            called without a closure; a gradient is sparse.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ("scaling", "eta", "ascent_fraction", "sync_ascent")
    group_settings: ClassVar[tuple[str, ...]] = ("eta",)
    takes_sharded = True
    recordable = True

    def __init__(
        self,
        named_parameters: Parameters,
        base: BaseOptimizer,
        rho: NotNegative = 0.5,
        scaling: Literal["samsung", "saft", "printed"] = "samsung",
        eta: NotNegative = 0.01,
        ascent_fraction: Share = 1.0,
        sync_ascent: bool = True,
    ) -> None:
        self.scaling = scaling
        self.eta = eta
        super().__init__(named_parameters, base, rho, ascent_fraction, sync_ascent)

    def validate(self) -> None:
        super().validate()
        if self.scaling == "samsung" and not self.names:
            raise InputError(
                "ASAM(scaling='samsung') tells weights from other parameters by their names and got none: "
                "pass model.named_parameters() instead of model.parameters(), or take scaling='saft'"
            )

    def compute_perturbation(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        names = self.names
        return compute_asam_perturbation(
            params,
            grads,
            self.read_setting("rho", params, signed=True),
            scaling=self.scaling,
            eta=self.read_setting("eta", params),
            is_weight=["weight" in names.get(p, "") for p in params],
        )
