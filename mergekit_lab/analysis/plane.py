"""Models on a plane, or in a larger space, of task vectors, evaluated without writing one to disk.

`θ0 + Σ α_t τ_t` is written into one module's tensors in place, from θ0 each time, so that no error adds up
over a grid. One forward pass per point and task gives losses, accuracies and predictions together.

Legend: A values of α, N samples, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mergekit_lab.errors import InputError, listing


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
                raise InputError(f"{label} lacks {len(missing)} tensors of the model ({listing(missing)})")
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
class ImageTask:
    """Images to evaluate on, on the model's device.

    Attributes:
        head: `[C, D]`; logits are `features @ head.T`.
        images: `[N, …]`, as the encoder takes them.
        labels: `[N]`.
    """

    head: Tensor
    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Scores:
    """Of one model on one task.

    Attributes:
        loss: mean cross-entropy, in nats.
        accuracy: in [0, 1].
        predictions: `[N]`.
    """

    loss: float
    accuracy: float
    predictions: Tensor


@torch.inference_mode()
def score(encoder: nn.Module, task: ImageTask, batch_size: int = 512) -> Scores:
    """Loss, accuracy and predictions of an encoder with a task's head."""
    was_training = encoder.training
    encoder.eval()
    loss, found = torch.zeros((), dtype=torch.float64, device=task.labels.device), []
    for images, labels in zip(task.images.split(batch_size), task.labels.split(batch_size), strict=True):
        logits = (encoder(images) @ task.head.T).float()
        loss += functional.cross_entropy(logits, labels, reduction="sum")
        found.append(logits.argmax(dim=-1))
    encoder.train(was_training)
    predictions = torch.cat(found)
    right = (predictions == task.labels).float().mean()
    return Scores(float(loss) / len(predictions), float(right), predictions)


Row = dict[str, list[float]]
"""One row of a plane: for every measure (`loss/cars`, `accuracy/cars`, `xi`) its A values."""


def plane(
    encoder: nn.Module,
    weights: Weights,
    tasks: Mapping[str, ImageTask],
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
        encoder: the module that `weights` moves.
        tasks: what is evaluated; the pair among them.
        pair: the experts of the two axes.
        alphas: of both axes.
        others: `α` of further experts, everywhere on the plane but not in the single models (ξ_all).
        start: the first row, to go on from.

    Yields:
        Row `start`, `start + 1`, …: α1 is fixed in a row, α2 runs.
    """
    fixed = dict(others or {})
    alone = {
        task: [_at(encoder, weights, {task: a}, tasks[task], batch_size).predictions for a in alphas]
        for task in pair
    }
    for i in range(start, len(alphas)):
        row: Row = {}
        for j in range(len(alphas)):
            weights.move({**fixed, pair[0]: alphas[i], pair[1]: alphas[j]})
            xi = 0.0
            for name, task in tasks.items():
                scores = score(encoder, task, batch_size)
                row.setdefault(f"loss/{name}", []).append(scores.loss)
                row.setdefault(f"accuracy/{name}", []).append(scores.accuracy)
                if name in pair:
                    single = alone[name][i if name == pair[0] else j]
                    xi += float((scores.predictions != single).float().mean())
            row.setdefault("xi", []).append(xi)
        yield row


def _at(
    encoder: nn.Module, weights: Weights, place: Mapping[str, float], task: ImageTask, batch_size: int
) -> Scores:
    weights.move(place)
    return score(encoder, task, batch_size)


def line(
    encoder: nn.Module,
    weights: Weights,
    label: str,
    alphas: Sequence[float],
    tasks: Mapping[str, ImageTask],
    batch_size: int = 512,
) -> dict[str, dict[str, list[float]]]:
    """Loss and accuracy of every task along `θ0 + α τ`: `{task: {"loss": [A], "accuracy": [A]}}`."""
    found: dict[str, dict[str, list[float]]] = {t: {"loss": [], "accuracy": []} for t in tasks}
    for alpha in alphas:
        weights.move({label: alpha})
        for name, task in tasks.items():
            scores = score(encoder, task, batch_size)
            found[name]["loss"].append(scores.loss)
            found[name]["accuracy"].append(scores.accuracy)
    return found


def barrier(values: Sequence[float], places: Sequence[float]) -> float:
    """The largest rise of a loss above the straight line between its ends (Frankle et al. 2020); at least 0.

    Args:
        values: along a path.
        places: where, rising from the first to the last.
    """
    first, last = values[0], values[-1]
    span = places[-1] - places[0]
    straight = [first + (last - first) * (p - places[0]) / span for p in places]
    return max(0.0, *(v - s for v, s in zip(values, straight, strict=True)))


@torch.inference_mode()
def cross_task_linearity(
    encoder: nn.Module,
    blocks: Mapping[str, nn.Module],
    weights: Weights,
    pair: tuple[str, str],
    images: Tensor,
    *,
    coefficient: float = 0.3,
    batch_size: int = 256,
) -> dict[str, float]:
    """CTL per block: `E[1 − cos(f(θ0 + λ(τ_s + τ_t)), ½ f(θ0 + 2λτ_s) + ½ f(θ0 + 2λτ_t))]`.

    Zhou et al. 2024, "On the emergence of cross-task linearity in the pretraining–finetuning paradigm"; a
    sample's features are all of a block's output. 0: merging weights averages features.

    Args:
        blocks: modules of the encoder whose outputs are compared, by name.
        images: what both experts see, `[N, …]`.
        coefficient: λ.
    """
    first, second = pair
    places = [
        {first: coefficient, second: coefficient},
        {first: 2 * coefficient},
        {second: 2 * coefficient},
    ]
    totals = dict.fromkeys(blocks, 0.0)
    for part in images.split(batch_size):
        outputs = []
        for place in places:
            weights.move(place)
            outputs.append(_outputs(encoder, blocks, part))
        merged, one, other = outputs
        for name in blocks:
            near = functional.cosine_similarity(merged[name], (one[name] + other[name]) / 2, dim=1)
            totals[name] += float((1 - near).sum())
    return {name: total / len(images) for name, total in totals.items()}


def _outputs(encoder: nn.Module, blocks: Mapping[str, nn.Module], images: Tensor) -> dict[str, Tensor]:
    """What each block gives for the images, `[N, …]` flattened, in float32."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            tensor = output if isinstance(output, Tensor) else output[0]
            kept[name] = tensor.flatten(1).float()

        return hook

    handles = [block.register_forward_hook(keep(name)) for name, block in blocks.items()]
    try:
        encoder(images)
    finally:
        for handle in handles:
            handle.remove()
    return kept


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
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
