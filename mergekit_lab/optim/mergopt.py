"""MergOPT: step with the gradient taken where a merge with unknown experts might put the weights.

MergOPT: A Merge-Aware Optimizer for Robust Model Merging, section 3.2.3 and algorithm 1 (no public code):
each step draws a coefficient α from a set, a number of experts K from 1…K_max and a task vector z, entry by
entry, from a Laplace distribution, and takes the gradient at θ + (Kα − 1) z, where merging K experts that
all moved by z would end.

Where we differ: θ comes back from a copy; the draws are a function of (seed, step), so a resumed run needs
only the step count; the offset is added in float32 whatever the precision of the weights; `gaussian` is our
addition.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.optim.checks import require_integer, require_known, require_number
from mergekit_lab.optim.wrapper import BaseOptimizer, Closure, Parameters, WrappedOptimizer

DISTRIBUTIONS = ("laplace", "gaussian")
ENTRIES_PER_DRAW = 2**24
_BELOW_ONE = 1 - 2**-24


def hashed(seed: int, step: int, what: str) -> int:
    """64 well-mixed bits for one purpose (`what`) of one step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{what}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def merge_factor(seed: int, step: int, coefficients: Sequence[float], max_experts: int) -> float:
    """Kα − 1 of a step: α uniform over `coefficients`, K uniform over 1…`max_experts`."""
    alpha = coefficients[hashed(seed, step, "coefficient") % len(coefficients)]
    experts = 1 + hashed(seed, step, "experts") % max_experts
    return experts * alpha - 1


def sample(
    count: int, generator: torch.Generator, dtype: torch.dtype, *, distribution: str, loc: float, scale: float
) -> Tensor:
    """`[count]` independent draws on the generator's device.

    Laplace by inversion: u uniform on [−1, 1) gives loc − scale · sign(u) · log(1 − |u|). |u| is kept below
    1, which a uniform does reach, so every draw is finite.
    """
    draws = torch.empty(count, dtype=dtype, device=generator.device)
    if distribution == "gaussian":
        draws.normal_(generator=generator)
    else:
        draws.uniform_(-1, 1, generator=generator)
        log = draws.abs().clamp_(max=_BELOW_ONE).neg_().log1p_()
        draws = log.copysign_(draws)
    return draws.mul_(scale).add_(loc)


def add_offset(
    params: list[Tensor], seed: int, factor: float, *, distribution: str, loc: float, scale: float
) -> None:
    """Add `factor` · z to `params` in place, z drawn entry by entry.

    Args:
        params: any shapes and devices. z is drawn and added in float64 for float64 parameters, in float32
            for all others; low precisions are rounded once, after the addition.
        seed: 64 bits; the same seed and layout of parameters give the same z on one type of device.
        factor: Kα − 1.
        distribution, loc, scale: `laplace` with mean `loc` and mean absolute deviation `scale`, or
            `gaussian` with mean `loc` and standard deviation `scale`.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for group in _drawn_together(params):
        device = group[0].device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        z = sample(
            sum(p.numel() for p in group),
            generators[device],
            _wide(group[0]),
            distribution=distribution,
            loc=factor * loc,
            scale=factor * scale,
        )
        pieces = z.split([p.numel() for p in group])
        torch._foreach_add_(group, [piece.view(p.shape) for piece, p in zip(pieces, group, strict=True)])


def _wide(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _drawn_together(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that share a device and precision, about `ENTRIES_PER_DRAW` entries at a time.

    One draw serves many small tensors; one draw for all would double the memory of a large model.
    """
    group: list[Tensor] = []
    entries = 0
    for p in params:
        kind = (p.device, _wide(p))
        if group and (kind != (group[0].device, _wide(group[0])) or entries + p.numel() > ENTRIES_PER_DRAW):
            yield group
            group, entries = [], 0
        group.append(p)
        entries += p.numel()
    if group:
        yield group


class MergOPT(WrappedOptimizer):
    """Merge-aware optimization around any base optimizer. One evaluation a step.

    With a closure, `step(closure)` does everything: it moves the weights to the offset point, drops the
    gradients, calls the closure once, puts θ back and lets the base step.

    Without one, the weights live at the offset point while training. `train()` moves them there and `eval()`
    back to θ, any number of times, but not between a forward pass and its backward. In train mode `step()`
    puts θ back, lets the base step, and moves on to the next offset point; the loop owns the gradients, so
    micro-batches accumulate as usual, and `step(closure)` calls the closure where the weights are, without
    zeroing first. Both ways give the same weights. The optimizer starts in eval mode.

    Call `eval()` before evaluating, saving or loading weights: in train mode the model holds the offset
    point. `state_dict()` may be taken in either mode, for it does not depend on where the weights are.

    The offset covers the parameters that require a gradient. Extra memory: one copy of them, while they are
    away from θ.

    Args:
        named_parameters, base: see `WrappedOptimizer`; names are not needed.
        coefficients: A, the merging coefficients to draw from; not empty.
        max_experts: K_max ≥ 1.
        loc: μ, the mean of z, in units of the weights.
        scale: ≥ 0; b (Laplace) or the standard deviation (Gaussian) of z, in units of the weights. With
            `loc` and `scale` 0 this is the base optimizer.
        distribution: `laplace` or `gaussian`.
        seed: the offset of a step is a function of (`seed`, number of steps done), the parameters' layout
            and the type of device; ranks with the same seed take the same offset.

    Attributes:
        steps_done: base steps so far.

    Raises:
        InputError: a hyper-parameter out of range; `step()` in eval mode without a closure; a sparse
            gradient.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = (
        "coefficients",
        "max_experts",
        "loc",
        "scale",
        "distribution",
        "seed",
        "steps_done",
    )

    def __init__(
        self,
        named_parameters: Parameters,
        base: BaseOptimizer,
        coefficients: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
        max_experts: int = 7,
        loc: float = 0.0,
        scale: float = 5e-4,
        distribution: str = "laplace",
        seed: int = 0,
    ) -> None:
        self.coefficients = list(coefficients)
        self.max_experts = max_experts
        self.loc = loc
        self.scale = scale
        self.distribution = distribution
        self.seed = seed
        self.steps_done = 0
        self._unmoved: list[tuple[Tensor, int]] = []
        super().__init__(named_parameters, base)

    def validate(self) -> None:
        if not self.coefficients:
            raise InputError("coefficients is empty; give at least one merging coefficient, such as 0.3")
        for alpha in self.coefficients:
            require_number("coefficients", alpha)
        require_integer("max_experts", self.max_experts, minimum=1)
        require_number("loc", self.loc)
        require_number("scale", self.scale, minimum=0)
        require_known("distribution", self.distribution, DISTRIBUTIONS)
        require_integer("seed", self.seed)

    @property
    def unmoved_fraction(self) -> float | None:
        """Fraction (0…1) of the low-precision entries the last offset left at θ, being under half an ulp.

        None if no parameter is of low precision or the last offset was zero anyway (Kα = 1, or no scale).
        Reading it waits for the device.
        """
        total = sum(entries for _, entries in self._unmoved)
        return sum(int(same) for same, _ in self._unmoved) / total if total else None

    def train(self) -> None:
        """Move the weights to the offset point of the coming step, unless they are there."""
        if not self.theta.held:
            self._move()

    def eval(self) -> None:
        """Put the weights back to θ, unless they are there."""
        with torch.no_grad():
            self.theta.restore()

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One update; returns the closure's loss, at the offset point, or None without a closure.

        In eval mode gradients are dropped before the closure is called; in train mode they are the loop's.

        Raises:
            InputError: no closure in eval mode, where the gradient would be that of θ; a sparse gradient.
        """
        stays_in_train_mode = self.theta.held
        if closure is None and not stays_in_train_mode:
            raise InputError(
                "MergOPT.step() without a closure needs train mode, else the gradient is that of θ and no "
                "offset plays a part: call optimizer.train() before the forward pass, or pass a closure "
                "(Lightning does, except with precision='16-mixed': use 'bf16-mixed')"
            )
        loss = None
        if closure is None:
            self.refuse_sparse_gradients()
        else:
            try:
                self.train()
                loss = self.evaluate(closure, zero=not stays_in_train_mode)
            finally:
                if not stays_in_train_mode:
                    self.eval()
        self.eval()
        self.base.step()
        self.steps_done += 1
        if stays_in_train_mode:
            self.train()
        return loss

    @torch.no_grad()
    def _move(self) -> None:
        params = [p for p in self.parameters if p.requires_grad]
        copies = self.theta.save(params)
        self._unmoved.clear()
        factor = merge_factor(self.seed, self.steps_done, self.coefficients, self.max_experts)
        if factor == 0 or (self.loc == 0 and self.scale == 0):
            return
        noise_seed = hashed(self.seed, self.steps_done, "offset")
        add_offset(params, noise_seed, factor, distribution=self.distribution, loc=self.loc, scale=self.scale)
        for p, before in zip(params, copies, strict=True):
            if torch.finfo(p.dtype).bits < 32:
                self._unmoved.append(((p == before).sum(), p.numel()))
