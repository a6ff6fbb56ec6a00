"""Sparse SAM: SAM that moves only weights in a mask, chosen by importance or by a changing random set.

Mi, Shen, Ren, Zhou, Sun, Ji, Tao: Make Sharpness-Aware Minimization Stronger: A Sparsified Perturbation
Approach (NeurIPS 2022), section 3.3, algorithms 1 to 3. Reference implementation:
Mi-Peng/Sparse-Sharpness-Aware-Minimization, `SSAMF` and `SSAMD` with drop_strategy="gradient",
growth_strategy="random".

- `SSAMF` chooses the entries with the largest empirical Fisher information.
- `SSAMD` starts from a random choice. Every few steps it replaces the entries with the smallest gradient by as
  many random others. The share that it replaces decays by half a cosine.

The norm in ρ g / ‖g‖ is that of the whole gradient, as in their code: masked perturbations are shorter than ρ.

Where we differ: masks are renewed by steps, not epochs. `SSAMF` estimates the Fisher information by summing the
squares of the gradients that it computes anyway, between two masks. The authors run the model on single
samples. Both order entries alike if batch gradients are mostly noise. `use_fisher` takes single-sample
estimates. The random choices of `SSAMD` are a function of (seed, step). The number of chosen entries is exact,
and ties go to the first. The norm gets 1e-12 added, theirs 1e-7. Otherwise as in sam.py.
"""

import math
from collections.abc import Hashable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from mergekit_lab.errors import InputError, join_names
from mergekit_lab.optim.ascent import AscentOptimizer
from mergekit_lab.optim.noise import Noise, hash_bits
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters
from mergekit_lab.optim.precision import widen
from mergekit_lab.optim.sam import compute_sam_perturbation
from mergekit_lab.ranges import Count, NotNegative, Proportion


def select_largest(scores: Tensor, count: int) -> Tensor:
    """Select the `count` largest of `scores` `[N]` as bool `[N]`. Ties go to the first."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.kthvalue(scores.numel() - count + 1).values
    chosen = scores > threshold
    missing = count - int(chosen.sum())
    chosen[(scores == threshold).nonzero().flatten()[:missing]] = True
    return chosen


def exchange(mask: Tensor, drop: Tensor, grow: Tensor, rate: float) -> Tensor:
    """Replace part of a mask's chosen entries by as many others.

    Args:
        mask: bool `[N]`.
        drop: `[N]`. Chosen entries with the smallest values are dropped.
        grow: `[N]`. Of the others, those with the largest values are added.
        rate: part of the chosen entries to drop, in [0, 1]; at most as many as there are others.
    """
    chosen = int(mask.sum())
    going = int(min(chosen * rate, mask.numel() - chosen))
    stays = select_largest(drop.masked_fill(~mask, -math.inf), chosen - going)
    comes = select_largest(grow.masked_fill(mask, -math.inf), going)
    return stays | comes


class SparseAscent(AscentOptimizer):
    """The base of `SSAMF` and `SSAMD`: a mask over all parameters together, renewed every few steps."""

    saved_attributes: ClassVar[tuple[str, ...]] = ("sparsity", "every", "steps_done")
    saved_tensors: ClassVar[tuple[str, ...]] = ("mask",)
    mask: dict[Tensor, Tensor]

    def __init__(
        self,
        named_parameters: Parameters,
        base: BaseOptimizer,
        rho: NotNegative = 0.05,
        sparsity: Proportion = 0.5,
        every: Count = 100,
    ) -> None:
        self.sparsity = sparsity
        self.every = every
        self.steps_done = 0
        super().__init__(named_parameters, base, rho)

    def perturb_masked(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """SAM's perturbation inside the mask, 0 outside."""
        shift = compute_sam_perturbation(widen(grads), self.read_setting("rho", params, signed=True))
        torch._foreach_mul_(shift, [self.mask[p].to(e.dtype) for p, e in zip(params, shift, strict=True)])
        return shift

    def set_mask(self, params: list[Tensor], chosen: Tensor) -> None:
        """Set the mask of `params` to bool `chosen` `[N]`, over all entries of `params` in order."""
        pieces = chosen.split([p.numel() for p in params])
        for p, piece in zip(params, pieces, strict=True):
            if p in self.mask:
                self.mask[p].copy_(piece.view(p.shape))
            else:
                self.mask[p] = piece.view(p.shape).to(p.device)

    def plan(self) -> Hashable:
        renews = self.steps_done % self.every == 0 or not self.mask
        return None if renews else super().plan()

    def count_step(self) -> None:
        super().count_step()
        self.steps_done += 1


class SSAMF(SparseAscent):
    """Sparse SAM with a Fisher mask around any base optimizer. Two evaluations per step.

    Extra memory: SAM's, a mask, and the sum of squared gradients.

    Args:
        named_parameters, base: see `WrappedOptimizer`; only `use_fisher` needs names.
        rho: radius ρ ≥ 0 of the ball, before masking; 0 is the base optimizer.
        sparsity: part of all entries that is not moved, in [0, 1]; 0 is SAM, 1 the base optimizer at twice
            its cost.
        every: steps ≥ 1 between two masks. The first mask is made from the first gradient.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ("external_fisher",)
    saved_tensors: ClassVar[tuple[str, ...]] = ("squares",)
    recordable = True
    squares: dict[Tensor, Tensor]
    external_fisher = False

    def use_fisher(self, fisher: Mapping[str, Tensor]) -> None:
        """Mask by this empirical Fisher diagonal from now on, instead of estimating one.

        Args:
            fisher: entries ≥ 0 by parameter name, with the parameters' shapes. Other names are ignored.

        Raises:
            InputError: parameters have no names, or `fisher` lacks a name or has another shape.
        """
        names = self.names
        if not names:
            raise InputError("use_fisher finds entries by name: build SSAMF from model.named_parameters()")
        odd = [n for p, n in names.items() if n not in fisher or fisher[n].shape != p.shape]
        if odd:
            raise InputError(f"the Fisher information is missing or has another shape for {join_names(odd)}")
        self.external_fisher = True
        self.squares.clear()
        self._renew(list(names), [fisher[n].to(p.device).float() for p, n in names.items()])

    def compute_perturbation(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        if not self.external_fisher:
            self._estimate(params, widen(grads))
        self.steps_done += 1
        return self.perturb_masked(params, grads)

    def _estimate(self, params: list[Tensor], grads: list[Tensor]) -> None:
        for p, g in zip(params, grads, strict=True):
            self.squares[p] = self.squares[p].addcmul_(g, g) if p in self.squares else g.square()
        if self.steps_done % self.every == 0 or any(p not in self.mask for p in params):
            known = [p for p in self.parameters if p in self.squares]
            self._renew(known, [self.squares[p] for p in known])
            torch._foreach_zero_(list(self.squares.values()))

    def _renew(self, params: list[Tensor], fisher: list[Tensor]) -> None:
        scores = torch.cat([f.flatten().to(fisher[0].device) for f in fisher])
        self.set_mask(params, select_largest(scores, int(scores.numel() * (1 - self.sparsity))))


class SSAMD(SparseAscent):
    """Sparse SAM with a dynamic mask around any base optimizer. Two evaluations per step.

    Extra memory: SAM's, and a mask.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        steps: number of planned steps, ≥ 1. At their end the mask stops changing.
        rho: radius ρ ≥ 0 of the ball, before masking; 0 is the base optimizer.
        sparsity: part of all entries that is not moved, in [0, 1]; 0 is SAM, 1 the base optimizer at twice
            its cost.
        drop_rate: part of the mask that the first renewal replaces, in [0, 1].
        every: steps ≥ 1 between two renewals. The first follows the first perturbation.
        seed: draws the random choices.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ("steps", "drop_rate", "seed")
    recordable = True

    def __init__(
        self,
        named_parameters: Parameters,
        base: BaseOptimizer,
        steps: Count,
        rho: NotNegative = 0.05,
        sparsity: Proportion = 0.5,
        drop_rate: Proportion = 0.5,
        every: Count = 100,
        seed: int = 0,
    ) -> None:
        self.steps = steps
        self.drop_rate = drop_rate
        self.seed = seed
        super().__init__(named_parameters, base, rho, sparsity, every)

    def compute_perturbation(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        if any(p not in self.mask for p in params):
            scores = self._draw_like(params, "mask")
            self.set_mask(
                params, select_largest(scores, scores.numel() - math.ceil(scores.numel() * self.sparsity))
            )
        shift = self.perturb_masked(params, grads)
        if self.steps_done % self.every == 0:
            mask = torch.cat([self.mask[p].flatten().to(params[0].device) for p in params])
            sizes = torch.cat([g.abs().flatten().to(mask.device) for g in widen(grads)])
            part = min(1.0, self.steps_done / self.steps)
            rate = self.drop_rate * (1 + math.cos(math.pi * part)) / 2
            self.set_mask(params, exchange(mask, sizes, self._draw_like(params, "growth"), rate))
        self.steps_done += 1
        return shift

    def _draw_like(self, params: list[Tensor], what: str) -> Tensor:
        generator = torch.Generator(params[0].device).manual_seed(hash_bits(self.seed, self.steps_done, what))
        count = sum(p.numel() for p in params)
        return Noise("gaussian").draw(count, generator, torch.float32)
