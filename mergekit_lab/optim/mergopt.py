"""MergOPT: step with the gradient taken where a merge with unknown experts might put the weights.

MergOPT: A Merge-Aware Optimizer for Robust Model Merging, section 3.2.3 and algorithm 1, from its text alone.
Each step draws three things: a coefficient α from a set, a number of experts K from 1…K_max, and a task vector
z, entry by entry, from a Laplace distribution. It takes the gradient at θ + (Kα − 1) z. There a merge of K
experts would end if all had moved by z.

Where we differ: θ is restored from a copy. Draws are a function of (seed, step), so a resumed run needs only
the step count. The offset is added in float32 for weights of any precision. `worst_of` is ours, and so
is the standard deviation of `gaussian`: D.4.1 prints none. The paper derives its method as an approximation to
the worst merge, and the worst of several draws comes closer to that.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.optim.fit import resolve_fit
from mergekit_lab.optim.noise import Noise, add_offset, hash_bits, load_move, save_and_move, to_signed
from mergekit_lab.optim.offset import OffsetOptimizer
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters
from mergekit_lab.optim.sharded import is_distributed, is_sharded
from mergekit_lab.optim.wrapper import Closure
from mergekit_lab.ranges import Count, NotNegative, Number, require


def merge_factor(
    seed: int, step: int, coefficients: Sequence[float], max_experts: int, draw_name: str = ""
) -> float:
    """Kα − 1 of a step: α uniform over `coefficients`, K uniform over 1…`max_experts`.

    `draw_name` tells the draws of one step apart.
    """
    alpha = coefficients[hash_bits(seed, step, f"coefficient{draw_name}") % len(coefficients)]
    experts = 1 + hash_bits(seed, step, f"experts{draw_name}") % max_experts
    return experts * alpha - 1


class MergOPT(OffsetOptimizer):
    """Merge-aware optimization around any base optimizer. One evaluation per step.

    With a closure or without, in eval mode or train mode: see `OffsetOptimizer`.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        coefficients: A, the merging coefficients to draw from; not empty.
        max_experts: K_max ≥ 1.
        loc: μ, the mean of z, in units of the weights.
        scale: ≥ 0; b (Laplace) or the standard deviation (Gaussian) of z, in units of the weights. With
            `loc` and `scale` 0 this is the base optimizer. "fit" estimates `loc` and `scale` from
            `task_vectors`.
        distribution: `laplace` or `gaussian`.
        seed: a step's offset is a function of (`seed`, number of steps done), the parameters' layout, the type
            of device, and whether Triton builds kernels for it. Ranks with the same seed take the same offset.
        worst_of: n ≥ 1 offsets are drawn per step. The gradient is taken at the one with the largest loss, over
            all ranks together unless `per_rank`. n > 1 takes n + 1 evaluations and needs a closure.
        per_rank: every rank draws its own offset, so a step averages over as many offsets as ranks.
        task_vectors: only for `scale="fit"`: an argument of `fit_offset`, such as a state dict of θ − θ0, or a
            list of them. It is not kept.

    Attributes:
        steps_done: base steps so far.
        fit: the fit of `scale="fit"`, else None.

    Raises:
        InputError: a hyper-parameter is out of range; `scale="fit"` without task vectors; `step` is called in
            eval mode without a closure; a gradient is sparse.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = (
        "coefficients",
        "max_experts",
        "loc",
        "scale",
        "distribution",
        "worst_of",
        "per_rank",
    )
    takes_sharded = True
    recordable = True

    def __init__(
        self,
        named_parameters: Parameters,
        base: BaseOptimizer,
        coefficients: Sequence[Number] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
        max_experts: Count = 7,
        loc: Number = 0.0,
        scale: NotNegative | Literal["fit"] = 5e-4,
        distribution: Literal["laplace", "gaussian"] = "laplace",
        seed: int = 0,
        worst_of: Count = 1,
        per_rank: bool = False,
        task_vectors: Iterable[Any] | Mapping[str, Any] | None = None,
    ) -> None:
        is_list = isinstance(coefficients, Sequence) and not isinstance(coefficients, str)
        require(is_list, "coefficients", coefficients, "a list of numbers")
        self.coefficients = list(coefficients)
        self.max_experts = max_experts
        self.distribution = distribution
        self.worst_of = worst_of
        self.per_rank = per_rank
        self.fit = resolve_fit(loc, scale, distribution, task_vectors)
        self.loc = self.fit.loc if self.fit else loc
        self.scale: Any = self.fit.scale if self.fit else scale
        super().__init__(named_parameters, base, seed)

    def validate(self) -> None:
        super().validate()
        if not self.coefficients:
            raise InputError("coefficients is empty; give at least one merging coefficient, such as 0.3")
        if self.worst_of > 1 and self._maximizes and not all(g.get("maximize") for g in self.param_groups):
            raise InputError(
                "MergOPT(worst_of=…) needs groups that all minimize or all maximize: set maximize alike in "
                "all groups, or worst_of=1"
            )
        if self.per_rank and any(is_sharded(p) for p in self.parameters):
            raise InputError(
                "MergOPT(per_rank=True) needs a whole model on every rank, and fully_shard spreads one over "
                "them: set per_rank=False, or use DistributedDataParallel"
            )

    @property
    def evaluations_per_step(self) -> int:  # type: ignore[override]
        return self.worst_of + 1 if self.worst_of > 1 and self._has_offset else 1

    @property
    def replayable(self) -> bool:
        """Not where losses choose the offset: the host compares them."""
        return super().replayable and self.evaluations_per_step == 1

    @property
    def _has_offset(self) -> bool:
        """Whether z can be other than 0."""
        return self.loc != 0 or self.scale != 0

    def draw(self, candidate: int) -> tuple[int, float]:
        """The seed and the factor Kα − 1 of one candidate offset."""
        rank = torch.distributed.get_rank() if self.per_rank and is_distributed() else 0
        draw_name = (f"/{candidate}" if candidate else "") + (f"/rank {rank}" if rank else "")
        factor = merge_factor(self.seed, self.steps_done, self.coefficients, self.max_experts, draw_name)
        return hash_bits(self.seed, self.steps_done, f"offset{draw_name}"), factor

    def save_and_move(self, params: list[Tensor], candidate: int) -> list[Tensor] | None:
        kernels = load_move(params) if self._has_offset else None
        if kernels is None:
            return super().save_and_move(params, candidate)
        if self.replay is not None:
            seed_tensor, factor_tensor = self.replay.seed, self.replay.factor
        else:
            seed, factor = self.draw(candidate)
            if factor == 0:
                self.theta.save(params)
                return None
            seed_tensor = torch.full((), to_signed(seed), dtype=torch.int64, device=params[0].device)
            factor_tensor = torch.full((), factor, device=params[0].device)
        copies = self.theta.save(params, copy=False)
        save_and_move(kernels, params, copies, seed_tensor, factor_tensor, self._noise)
        return copies

    def add_offset(self, params: list[Tensor], candidate: int) -> bool:
        if not self._has_offset:
            return False
        if self.replay is not None:
            add_offset(params, self.replay.generator, self.replay.factor, self._noise)
            return True
        seed, factor = self.draw(candidate)
        if factor != 0:
            add_offset(params, seed, factor, self._noise)
        return factor != 0

    @property
    def _noise(self) -> Noise:
        return Noise(self.distribution, self.loc, self.scale)

    def explore(self, closure: Closure) -> Any:
        if self.evaluations_per_step == 1:
            return super().explore(closure)
        losses = []
        for candidate in range(self.worst_of):
            self._move(candidate)
            losses.append(self.evaluate(closure, candidate))
            self.eval()
        self._move(self._choose_worst(losses))
        self.evaluate(closure, self.worst_of)
        return losses[0]

    def _choose_worst(self, losses: list[Any]) -> int:
        """The index of the largest loss, or of the smallest if the base maximizes. NaN counts as the worst."""
        for loss in losses:
            if not isinstance(loss, int | float | Tensor):
                raise InputError(
                    f"MergOPT(worst_of={self.worst_of}) compares losses, and the closure returned a "
                    f"{type(loss).__name__}: return the loss"
                )
        device = self.parameters[0].device
        values = torch.stack([torch.as_tensor(loss, device=device).float().reshape(()) for loss in losses])
        if not self.per_rank and is_distributed():
            torch.distributed.all_reduce(values)
        return int((-values if self._maximizes else values).argmax())

    @property
    def _maximizes(self) -> bool:
        return any(group.get("maximize") for group in self.param_groups)
