"""Localize-and-Stitch: keep the few entries of every task vector that its task needs, and average overlaps.

He et al. 2024, "Localize-and-Stitch: efficient model merging via sparse task arithmetic", section 4; reference:
uiuctml/Localize-and-Stitch (`localize_utils.py`). Localize: without data the entries of largest magnitude over
the whole model; with a task's samples, entries are chosen by gradient descent on the loss of `θ0 + σ(S) ∘ δ`,
which starts at those of largest magnitude. Stitch: `θ0 + Σ_t M_t ∘ δ_t / Σ_t M_t`.

The authors' code drops the entry at the threshold itself. Its step on `S` is `−lr·∇ + l1·sign(S)`, each times
the sigmoid's slope: its `l1` strengthens decisions, and so does ours. It leaves out the embeddings and the last
norm: `exclude` does that here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import ScaledMethod, Site, Stream
from mergekit_lab.merging.inputs import Source, open_inputs
from mergekit_lab.merging.selection import Largest, select_largest
from mergekit_lab.merging.task_arithmetic import TaskArithmetic
from mergekit_lab.ranges import Count, Magnitude, Positive, Share, check_settings


@dataclass(frozen=True, kw_only=True)
class Localization:
    """How masks are trained; the defaults are the authors' for images.

    Args:
        start: share of entries in the mask at first, in (0, 1].
        epochs: passes over the samples, each one step, at least 1.
        lr: learning rate of the mask, positive.
        bias: `|S|` at the start, positive.
        l1: how strongly each entry is pushed further to its side, ≥ 0.
    """

    start: Share = 1e-5
    epochs: Count = 10
    lr: Positive = 1e7
    bias: Positive = 5.0
    l1: Magnitude = 1.0

    def __post_init__(self) -> None:
        check_settings(Localization, vars(self))


@dataclass(frozen=True, kw_only=True)
class LocalizeStitch(ScaledMethod):
    """`θ0 + α Σ_t M_t ∘ λ_t δ_t / Σ_t M_t`, and the base where no mask is.

    Args:
        density: share of entries in each mask, the largest of an expert over the whole model, in (0, 1]; the
            authors' 0.05.
        learn: train the masks on the tasks' samples instead, and take them from
            `statistics={"mask": …}`: what `learn_masks` returns by expert. A run trains them itself.
        coefficient: `α`; 1 in the paper.
        weights: `λ_t`, 1 by default.
    """

    density: Share = 0.05
    learn: Localization | None = None

    elementwise = True
    pools = True

    @property
    def side_inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("mask",) if self.learn else ()

    def survey(self, stream: Stream) -> Largest | None:
        if self.learn or not stream.entries:
            return None
        shares = [share.read_blocks for share in stream.divide()]
        return select_largest(shares, _count(self.density, stream.entries), stream.entries, with_ties=True)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        masks = site.side["mask"] > 0 if self.learn else site.survey.trim(deltas, site.offset) != 0
        return (site.weigh(deltas) * masks).sum(dim=0).div_(masks.sum(dim=0).clamp_(min=1))


def learn_masks(
    base: Source,
    expert: Source,
    gradient: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    how: Localization,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """Which entries of an expert's task vector its task needs.

    Args:
        base, expert: state dicts or paths.
        gradient: of the task's loss, a mean over each batch and a sum over batches as in the authors' code,
            from a state dict to tensors by name; what it does not name does not move.
        how: the settings.
        device: where everything is kept: base, task vector, mask and gradient, a model's size each.

    Returns:
        By name 1 where an entry is in the mask and 0 elsewhere, in the base's dtype.

    Raises:
        InputError: inputs that disagree, or a gradient that is not finite.
    """
    inputs = open_inputs(base, {"the expert": expert}, TaskArithmetic())
    (own,) = inputs.experts.values()
    fixed = {name: inputs.base[name].to(device) for name in inputs.base}
    deltas = {n: own[n].to(device, inputs.compute) - fixed[n].to(inputs.compute) for n in inputs.merged}
    entries = sum(delta.numel() for delta in deltas.values())

    blocks = [(None, delta.reshape(1, -1), None) for delta in deltas.values() if delta.numel()]
    largest = select_largest([lambda: iter(blocks)], _count(how.start, entries), entries, with_ties=True)
    masks = {
        name: torch.where(delta.abs() >= largest.thresholds[0], how.bias, -how.bias).to(delta)
        for name, delta in deltas.items()
    }
    for epoch in range(how.epochs):
        shares = {name: mask.sigmoid() for name, mask in masks.items()}
        state = fixed | {n: (fixed[n] + shares[n] * delta).to(fixed[n].dtype) for n, delta in deltas.items()}
        state |= {name: state[first] for name, first in inputs.tied.items()}
        for name, slope in gradient(state).items():
            if name not in masks:
                continue
            if not bool(slope.isfinite().all()):
                raise InputError(f"the gradient of {name} is not finite in epoch {epoch}: lower lr")
            fall = shares[name] * (1 - shares[name])
            push = torch.where(masks[name] > 0, how.l1, -how.l1)
            masks[name].sub_((how.lr * slope * deltas[name] - push) * fall)
    return {name: (mask > 0).to(inputs.base.specs[name].dtype) for name, mask in masks.items()}


def _count(share: float, entries: int) -> int:
    return max(1, int(share * entries))
