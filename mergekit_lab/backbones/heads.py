"""Linear heads made from images, for a pretrained encoder's features: class means, and a linear probe.

They need no text tower. Like zero-shot heads they are made once from the pretrained backbone and stay frozen:
only the encoder is fine-tuned and merged.

Legend: N images, C classes, D embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from mergekit_lab.checkpoints import open_checkpoint, write_tensors
from mergekit_lab.errors import InputError
from mergekit_lab.machine import list_devices
from mergekit_lab.tasks import ImageTask, Keeper, Part

_FILE = "head.safetensors"
_BATCH = 512
_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
_ITERATIONS = 200


def find_head(
    keep: Keeper | None, describe: Callable[[], Mapping[str, Any]], make: Callable[[torch.device], Tensor]
) -> Tensor:
    """The head `[C, D]` that `keep` holds, made on its device if there is none.

    Args:
        keep: None makes the head anew, on the first device of this machine.
        describe: gives everything that the head depends on.
    """
    if keep is None:
        return make(torch.device(list_devices()[0]))

    def write(out: Path) -> dict[str, Any]:
        head = make(keep.device)
        write_tensors(out / _FILE, {"head": head}, sync=False)
        return {"classes": len(head)}

    return open_checkpoint(keep("heads", describe(), 0, write) / _FILE)["head"]


@torch.no_grad()
def compute_features(
    encoder: nn.Module, task: ImageTask, part: Part, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Features float32 `[N, D]` and labels `[N]` of a part, on the device."""
    samples = task.load_samples(part)
    features = [
        encoder(samples.images[index].to(device)).float() for index in torch.arange(len(samples)).split(_BATCH)
    ]
    return torch.cat(features), samples.labels.to(device)


def make_prototype_head(
    encoder: nn.Module, task: ImageTask, temperature: float, device: torch.device
) -> Tensor:
    """The mean feature of each class, normalized, times the temperature: float32 `[C, D]`.

    Raises:
        InputError: a class has no training image.
    """
    features, labels = compute_features(encoder, task, "train", device)
    return make_prototypes(features, labels, task.classes, temperature, task.name, "an image")


def make_prototypes(
    features: Tensor, labels: Tensor, classes: Sequence[str], temperature: float, task: str, sample: str
) -> Tensor:
    """Class means of features `[N, D]`, normalized, times the temperature: float32 `[C, D]`, on the CPU.

    Args:
        labels: int64 `[N]`.
        classes: the class names.
        task, sample: what error messages call the task and a sample of it.

    Raises:
        InputError: a class has no sample.
    """
    sums = torch.zeros(len(classes), features.shape[1], device=features.device).index_add_(0, labels, features)
    empty = (torch.bincount(labels, minlength=len(classes)) == 0).nonzero().flatten().tolist()
    if empty:
        raise InputError(
            f"a prototype head needs {sample} of every class, but the training part of "
            f"{task!r} has none of {classes[empty[0]]!r}"
        )
    return (normalize(sums, dim=-1) * temperature).cpu()


def make_linear_probe_head(
    encoder: nn.Module, task: ImageTask, temperature: float, device: torch.device
) -> Tensor:
    """Logistic regression on training features, without an intercept: float32 `[C, D]`.

    The L2 penalty is the best of 1e-4, 1e-3, 1e-2 and 1e-1 on the validation part. Features are multiplied by
    the temperature, so a penalty means the same for every backbone.
    """
    train, labels = compute_features(encoder, task, "train", device)
    validation, wanted = compute_features(encoder, task, "validation", device)
    probes = (_fit_probe(train * temperature, labels, len(task.classes), penalty) for penalty in _PENALTIES)
    best = max(probes, key=lambda probe: float((validation @ probe.T).argmax(1).eq(wanted).float().mean()))
    return (best * temperature).cpu()


def _fit_probe(x: Tensor, labels: Tensor, classes: int, penalty: float) -> Tensor:
    weights = torch.zeros(classes, x.shape[1], device=x.device, requires_grad=True)
    solver = torch.optim.LBFGS([weights], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def compute_loss() -> Any:
        solver.zero_grad()
        value = cross_entropy(x @ weights.T, labels) + penalty * weights.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(compute_loss)
    return weights.detach()
