"""Models on a plane, or in a larger space, of task vectors, evaluated without writing one to disk.

`θ0 + Σ α_t τ_t` is written into one module's tensors in place, from θ0 each time, so that no error adds up
over a grid. One forward pass per point and task gives losses, accuracies and predictions together.

Legend: A values of α, N samples.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mergekit_lab.backbones import Objective
from mergekit_lab.backbones.objective import find_device
from mergekit_lab.batches import IGNORED, Batch, to_device
from mergekit_lab.curvature import likelihood
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.evaluation import Scores, score
from mergekit_lab.tasks import Part


class Weights:
    """A module whose weights can be put anywhere in the span of task vectors.

    Args:
        module: its floating-point tensors are overwritten; they keep their dtype and device.
        base: `θ0` by name.
        ends: `θ_t` by name of the expert (or of anything else that lies a vector away from θ0).

    Raises:
        InputError: a state dict that lacks a tensor of the module.
    """

    def __init__(
        self, module: nn.Module, base: Mapping[str, Tensor], ends: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        named = {n: t.detach() for n, t in module.state_dict().items() if t.is_floating_point()}
        for label, state in {"the base": base, **ends}.items():
            missing = named.keys() - state.keys()
            if missing:
                raise InputError(f"{label} lacks {len(missing)} tensors of the model ({join_names(missing)})")
        self._targets = list(named.values())
        self._base = [base[n].to(t) for n, t in named.items()]
        self._vectors = {
            label: [(state[n].double() - base[n].double()).to(t) for n, t in named.items()]
            for label, state in ends.items()
        }

    @torch.no_grad()
    def move(self, at: Mapping[str, float]) -> None:
        """To `θ0 + Σ α_t τ_t`; vectors that are not named have α = 0."""
        torch._foreach_copy_(self._targets, self._base)
        for label, alpha in at.items():
            if alpha:
                torch._foreach_add_(self._targets, self._vectors[label], alpha=alpha)


@dataclass(frozen=True)
class Sample:
    """Samples of a task to evaluate on.

    Attributes:
        objective: where the model is.
        part: train, validation or test.
        index: which, int64 `[N]`.
    """

    objective: Objective
    part: Part
    index: Tensor

    def score(self, model: nn.Module, batch_size: int = 512) -> Scores:
        """Loss, value and predictions of a model."""
        return score(model, self.objective, self.part, index=self.index, batch_size=batch_size, with_loss=True)


Row = dict[str, list[float]]
"""One row of a plane: for every measure (`loss/cars`, `value/cars`, `xi`) its A values."""


def evaluate_plane(
    model: nn.Module,
    weights: Weights,
    tasks: Mapping[str, Sample],
    pair: tuple[str, str],
    alphas: Sequence[float],
    *,
    others: Mapping[str, float] | None = None,
    start: int = 0,
    batch_size: int = 512,
) -> Iterator[Row]:
    """Losses, accuracies and the disentanglement error on the plane of two task vectors.

    `ξ(α1, α2) = Σ_t P_x[f(x; θ0 + α_t τ_t) ≠ f(x; θ0 + α1 τ1 + α2 τ2)]` over the pair's tasks: how often a
    prediction is changed by the other task's vector (Ortiz-Jimenez et al. 2023, equation 8, with disagreement
    as the distance). It lies in [0, 2].

    Args:
        model: the module that `weights` moves.
        tasks: what is evaluated; the pair among them.
        pair: the experts of the two axes.
        alphas: of both axes.
        others: `α` of further experts, everywhere on the plane but not in the single models (ξ_all).
        start: the first row, to go on from.

    Yields:
        Row `start`, `start + 1`, …: α1 is fixed in a row, α2 runs.
    """
    fixed = dict(others or {})
    alone: dict[str, list[Scores]] = {task: [] for task in pair}
    for expert, scored in alone.items():
        for a in alphas:
            weights.move({expert: a})
            scored.append(tasks[expert].score(model, batch_size))
    for i in range(start, len(alphas)):
        row: Row = {}
        for j in range(len(alphas)):
            weights.move({**fixed, pair[0]: alphas[i], pair[1]: alphas[j]})
            single = {pair[0]: alone[pair[0]][i], pair[1]: alone[pair[1]][j]}
            known = _find_on_axes(single, pair, (alphas[i], alphas[j])) if not fixed else {}
            xi = 0.0
            for name, task in tasks.items():
                scores = known.get(name) or task.score(model, batch_size)
                row.setdefault(f"loss/{name}", []).append(scores.loss)
                row.setdefault(f"value/{name}", []).append(scores.value)
                if name in single:
                    other = single[name].predictions
                    xi += sum(a != b for a, b in zip(scores.predictions, other, strict=True)) / len(other)
            row.setdefault("xi", []).append(xi)
        yield row


def _find_on_axes(
    single: Mapping[str, Scores], pair: tuple[str, str], alphas: tuple[float, float]
) -> dict[str, Scores]:
    """What is known already of a model on an axis: there a task's vector is alone."""
    first, second = alphas
    known = {pair[0]: single[pair[0]]} if second == 0 else {}
    return known | ({pair[1]: single[pair[1]]} if first == 0 else {})


def evaluate_line(
    model: nn.Module,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    alphas: Sequence[float],
    tasks: Mapping[str, Sample],
    batch_size: int = 512,
) -> dict[str, dict[str, list[float]]]:
    """Loss and value of every task along `start + α (end − start)`: `{task: {"loss": [A], "value": [A]}}`."""
    weights = Weights(model, start, {"the end": end})
    curves: dict[str, dict[str, list[float]]] = {t: {"loss": [], "value": []} for t in tasks}
    for alpha in alphas:
        weights.move({"the end": alpha})
        for name, task in tasks.items():
            scores = task.score(model, batch_size)
            curves[name]["loss"].append(scores.loss)
            curves[name]["value"].append(scores.value)
    return curves


def measure_barrier(values: Sequence[float], positions: Sequence[float]) -> float:
    """The largest rise of a loss above the straight line between its ends (Frankle et al. 2020); at least 0.

    NaN if a loss is not finite.

    Args:
        values: along a path.
        positions: where on it, rising from the first to the last.
    """
    if not all(map(math.isfinite, values)):
        return math.nan
    first, last = values[0], values[-1]
    span = positions[-1] - positions[0]
    straight = [first + (last - first) * (p - positions[0]) / span for p in positions]
    return max(0.0, *(v - s for v, s in zip(values, straight, strict=True)))


@torch.inference_mode()
def cross_task_linearity(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    weights: Weights,
    pair: tuple[str, str],
    samples: Sequence[Sample],
    *,
    coefficient: float = 0.3,
    batch_size: int = 256,
) -> dict[str, float]:
    """CTL per block: `E[1 − cos(f(θ0 + λ(τ_s + τ_t)), ½ f(θ0 + 2λτ_s) + ½ f(θ0 + 2λτ_t))]`.

    Zhou et al. 2024, "On the emergence of cross-task linearity in the pretraining–finetuning paradigm"; a
    sample's features are all of a block's output, but for the padding of a text. 0: merging weights averages
    features.

    Args:
        blocks: modules of the model whose outputs are compared, by name.
        samples: what both experts see.
        coefficient: λ.
    """
    first, second = pair
    points = [{first: coefficient, second: coefficient}, {first: 2 * coefficient}, {second: 2 * coefficient}]
    totals = dict.fromkeys(blocks, 0.0)
    for sample in samples:
        for part in sample.index.split(batch_size):
            batch = to_device(sample.objective.make_batch(sample.part, part), find_device(model))
            outputs = []
            for point in points:
                weights.move(point)
                outputs.append(_record_outputs(model, sample.objective, blocks, batch))
            merged, one, other = outputs
            for name in blocks:
                near = functional.cosine_similarity(merged[name], (one[name] + other[name]) / 2, dim=1)
                totals[name] += float((1 - near).sum())
    count = sum(len(sample.index) for sample in samples)
    return {name: total / count for name, total in totals.items()}


def _record_outputs(
    model: nn.Module, objective: Objective, blocks: Mapping[str, nn.Module], batch: Batch
) -> dict[str, Tensor]:
    """What each block gives for a batch, `[N, …]` flattened, in float32; 0 where a text is padded."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        tokens = _find_tokens(batch, objective.causal, name)

        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            tensor = (output if isinstance(output, Tensor) else output[0]).float()
            kept[name] = (tensor if tokens is None else tensor * tokens[..., None]).flatten(1)

        return hook

    handles = [block.register_forward_hook(keep(name)) for name, block in blocks.items()]
    try:
        likelihood.compute_logits(objective.with_head(model), batch, objective.causal)
    finally:
        for handle in handles:
            handle.remove()
    return kept


def _find_tokens(batch: Batch, causal: bool, block: str) -> Tensor | None:
    """Where tokens are and no padding, `[N, L]`, of what enters a block; None for other data than text."""
    if not isinstance(batch, Mapping):
        return None
    labels = batch["labels"]
    if not causal and labels.dim() == 2 and "decoder" in block:
        return labels != IGNORED
    mask: Tensor | None = batch.get("attention_mask")
    return mask


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The longest list of like modules in a model: its transformer blocks, by name.

    Raises:
        InputError: there is none.
    """
    lists = {
        name: list(module.named_children())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len({type(m) for m in module}) == 1
    }
    if not lists:
        raise InputError("the model has no list of blocks to look at")
    name = max(lists, key=lambda n: len(lists[n]))
    return {f"{name}.{child}" if name else child: module for child, module in lists[name]}
