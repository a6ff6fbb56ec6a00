"""Stage curvature: the Fishers and Grams that are asked for, one an expert, into the store."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from mergekit_lab.backbones import Classifier
from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.curvature import diagonal_fisher, input_grams
from mergekit_lab.stages.config import Curvature
from mergekit_lab.stages.context import Context, load_state
from mergekit_lab.store.store import Workplace

log = logging.getLogger(__name__)

_INSIDE = "encoder."


def stage_curvature(run: Context) -> None:
    asked = [kind for merger in run.mergers.values() for kind in merger.method.side_inputs]
    kinds = dict.fromkeys([*asked, *filter(None, [run.cfg.curvature.kind])])
    if not kinds:
        log.info("curvature: no merger of this run needs any")
    for kind in kinds:
        for task in run.tasks:
            artefact = run.obtain(f"{kind}s", run.side_content(kind, task), _maker(run, kind, task))
            how = "found in the store" if artefact.reused else f"{artefact.info['wall_seconds']:.1f} s"
            log.info("%s of %s: %s", kind, task, how)


def _maker(run: Context, kind: str, task: str) -> Any:
    def make(place: Workplace) -> Mapping[str, Any]:
        settings = Curvature(**run.plain["curvature"])
        encoder = run.encoder
        encoder.load_state_dict(load_state(run.expert(task)))
        model = Classifier(encoder, run.head(task)).to(run.device)
        count = settings.count(len(run.tasks[task].split("train")))
        batches = _batches(run, kind, task, count, settings.chunk)
        if kind == "fisher":
            found = diagonal_fisher(
                model, batches, sampled=settings.sampled, seed=run.seed, chunk=settings.chunk
            )
            tensors = _of_all_tensors(run, encoder, found)
            trace = sum(float(value.sum()) for value in found.values())
        else:
            found = input_grams(model, batches)
            tensors = {name.removeprefix(_INSIDE): value for name, value in found.items()}
            trace = sum(float(value.trace()) for value in found.values())
        write_tensors(place.out / f"{kind}.safetensors", tensors)
        return {"samples": count, "trace": trace}

    return make


def _batches(run: Context, kind: str, task: str, count: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first `count` training images of the run's shuffle, as float images and labels."""
    split = run.tasks[task].split("train")
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(run.seed))
    parts = order[:count].split(size)
    for part in track(parts, f"{kind} of {task}", disable=not run.cfg.progress, transient=True):
        yield split.images[part].to(run.device) / 255, split.labels[part].to(run.device)


def _of_all_tensors(run: Context, encoder: nn.Module, fisher: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Fisher under the names of the base, zero where nothing was trained."""
    names = {parameter: name for name, parameter in encoder.state_dict(keep_vars=True).items()}
    named = {
        names[p]: fisher[_INSIDE + own] for own, p in encoder.named_parameters() if _INSIDE + own in fisher
    }
    still = {
        n: torch.zeros_like(t) for n, t in run.base_state.items() if t.is_floating_point() and n not in named
    }
    return named | still
