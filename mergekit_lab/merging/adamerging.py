"""AdaMerging: a coefficient for every tensor and expert, learned on unlabeled inputs.

Yang et al. 2024, "AdaMerging: adaptive model merging for multi-task learning", section 3.2; reference:
EnnengYang/AdaMerging. The coefficients minimize the entropy of the merged model's predictions, summed over
tasks, by Adam (lr 1e-3) from 0.3, and are clamped to [0, 1] where they are used. "Layer-wise" in paper and code
means a coefficient per tensor, "task-wise" one per task vector.

The two halves are separate here: `learn_coefficients` needs a model and inputs, the method `AdaMerging` holds
what was learned and merges like any other. AdaMerging++ learns on task vectors trimmed by TIES: pass experts
made of those.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Method, Site
from mergekit_lab.merging.inputs import Source, Sources, open_inputs
from mergekit_lab.ranges import Count, Proportion, Rate, check_settings

_START = 0.3


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How coefficients are learned; the defaults are the authors'.

    Args:
        layer_wise: a coefficient per tensor and expert; otherwise one per expert.
        steps: Adam steps, at least 1.
        batch_size: inputs per task and step, at least 1.
        lr: Adam's learning rate, positive, at most 1e30.
        start: the coefficients before the first step, in [0, 1].
        part: whose inputs are read, without their labels: "test", "validation" or "train".
    """

    layer_wise: bool = True
    steps: Count = 500
    batch_size: Count = 16
    lr: Rate = 1e-3
    start: Proportion = _START
    part: Literal["test", "validation", "train"] = "test"

    def __post_init__(self) -> None:
        check_settings(Learning, vars(self))


@dataclass(frozen=True, kw_only=True)
class AdaMerging(Method):
    """`θ0 + Σ_t α_{l,t} δ_t` with a coefficient for each tensor `l` and expert `t`.

    Args:
        weights: `α`: one number per expert (task-wise), or per expert a mapping from tensor name or pattern to
            number (layer-wise), as `learn_coefficients` returns it. Missing ones are 0.3, where learning
            starts.
        learn: how a run, which has models and inputs, first learns the weights.

    Raises:
        InputError: both are given; at the merge, weights that have not been learned.
    """

    learn: Learning | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learn is not None and self.weights is not None:
            raise InputError("AdaMerging's weights are given: set learn to null, or weights to null")

    elementwise = True
    propagates = True
    default_weight = _START

    def check_tensors(self, names: Sequence[str]) -> None:
        super().check_tensors(names)
        if self.learn is not None:
            raise InputError(
                "AdaMerging learns its weights from a model and inputs, which a merge of checkpoints does not "
                "have: give weights and learn=null, or merge in a run over tasks"
            )

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        return site.weights @ deltas


def learn_coefficients(
    base: Source,
    experts: Sources,
    logits: Callable[[Mapping[str, Tensor], Any], Sequence[Tensor]],
    batches: Iterable[Any],
    *,
    layer_wise: bool = True,
    lr: float = 1e-3,
    start: float = _START,
    device: str | torch.device = "cpu",
) -> tuple[AdaMerging, list[float]]:
    """Learn AdaMerging's coefficients: one Adam step a batch on the entropy of the predictions.

    Args:
        base: `θ0`, a state dict or path.
        experts: `θ_t`: a mapping from name to state dict or path, or a list.
        logits: the model: from a merged state dict and a batch to logits `[n, classes]`, one tensor per task.
            Usually `torch.func.functional_call` on the encoder, then each task's head. It must be
            differentiable in the state dict, whose tensors are on `device`.
        batches: what to call it with; their number is the number of steps (the authors': 500 of 32 images a
            task, from the test inputs).
        layer_wise, lr, start: see `Learning`.
        device: where base and task vectors are kept: (T + 1) models, and the gradient of one.

    Returns:
        The method that holds the learned coefficients, and the entropy before each step (its mean over a
        task's inputs, summed over tasks; natural logarithm).

    Raises:
        InputError: a value out of range, inputs that disagree, no batch, or an entropy that is not finite.
    """
    Learning(layer_wise=layer_wise, lr=lr, start=start)  # refuses what is out of range
    inputs = open_inputs(base, experts, AdaMerging())
    fixed = {n: inputs.base[n].to(device) for n in inputs.base if n not in inputs.tied}
    wide = {n: fixed[n].to(inputs.compute) for n in inputs.merged}
    deltas = {
        n: torch.stack([expert[n].to(device, inputs.compute) - wide[n] for expert in inputs.experts.values()])
        for n in inputs.merged
    }
    rows = len(inputs.merged) if layer_wise else 1
    alphas = torch.full((rows, len(inputs.experts)), start, dtype=inputs.compute, device=device)
    optimizer = torch.optim.Adam([alphas.requires_grad_()], lr=lr)
    entropies: list[float] = []
    for batch in batches:
        used = alphas.clamp(0, 1).expand(len(inputs.merged), -1)
        state = dict(fixed)
        for row, name in zip(used, inputs.merged, strict=True):
            state[name] = (wide[name] + torch.tensordot(row, deltas[name], dims=1)).to(fixed[name].dtype)
        state |= {name: state[first] for name, first in inputs.tied.items()}
        entropy = torch.stack([_measure_entropy(out) for out in logits(state, batch)]).sum()
        entropies.append(float(entropy.detach()))
        if not math.isfinite(entropies[-1]):
            raise InputError(
                f"the entropy of the predictions is {entropies[-1]} at step {len(entropies) - 1}: look for NaN "
                "or infinite entries in the inputs"
            )
        optimizer.zero_grad()
        entropy.backward()
        optimizer.step()
    if not entropies:
        raise InputError("there is nothing to learn from: no batch was given")
    columns = dict(zip(inputs.experts, alphas.detach().clamp(0, 1).T.tolist(), strict=True))
    weights = {
        t: dict(zip(inputs.merged, column, strict=True)) if layer_wise else column[0]
        for t, column in columns.items()
    }
    return AdaMerging(weights=weights), entropies


def _measure_entropy(logits: Tensor) -> Tensor:
    """Mean entropy in nats of the softmax of `[n, classes]`."""
    log_probabilities = logits.log_softmax(dim=-1)
    return -(log_probabilities.exp() * log_probabilities).sum(dim=-1).mean()
