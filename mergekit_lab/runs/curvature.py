"""Stage curvature: the Fishers and Grams that are asked for, one an expert, into the store."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from mergekit_lab.batches import Batch, to_device
from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.curvature import diagonal_fisher, first_moment, input_grams
from mergekit_lab.errors import InputError
from mergekit_lab.runs.context import Context, load_state
from mergekit_lab.schema.run import Curvature
from mergekit_lab.store import Artifact
from mergekit_lab.store.store import Workplace

log = logging.getLogger(__name__)


def stage_curvature(run: Context) -> None:
    """Make what side inputs the run's mergers read, of every expert."""
    kinds = run.side_kinds
    if not kinds:
        log.info("curvature: no merger of this run needs any")
    missing = [task for task in run.tasks if run.mine(task) and not all(
        run.store.find(f"{kind}s", run.side_content(kind, task)) for kind in kinds)]  # fmt: skip
    run.spread(stage_curvature, missing)
    for kind in kinds:
        for task in filter(run.mine, run.tasks):
            artifact = obtain_side(run, kind, task)
            how = "found in the store" if artifact.reused else f"{artifact.info['wall_seconds']:.1f} s"
            log.info("%s of %s: %s", kind, task, how)


def obtain_side(run: Context, kind: str, task: str) -> Artifact:
    """An expert's Fisher or Grams, computed if they are not in the store."""
    return run.obtain(f"{kind}s", run.side_content(kind, task), _maker(run, kind, task))


def _maker(run: Context, kind: str, task: str) -> Any:
    def make(place: Workplace) -> Mapping[str, Any]:
        settings = Curvature(**run.plain["curvature"])
        objective = run.objective(task)
        run.model.load_state_dict(load_state(run.expert(task)))
        whole = objective.with_head(run.model)
        inside = prefix(whole, run.model)
        count = settings.count(run.tasks[task].count("train"))
        found = _computed(run, kind, task, whole, count, settings)
        if kind == "fisher":
            tensors = _of_all_tensors(run, {n.removeprefix(inside): v for n, v in found.items()})
            trace = sum(float(value.sum()) for value in found.values())
        else:
            tensors = {name.removeprefix(inside): value for name, value in found.items()}
            trace = sum(float(value.trace()) for value in found.values())
        write_tensors(place.out / f"{kind}.safetensors", tensors)
        return {"samples": count, "trace": trace}

    return make


def _computed(
    run: Context, kind: str, task: str, whole: nn.Module, count: int, settings: Curvature
) -> dict[str, Tensor]:
    """A Fisher or Grams of the first `count` samples; where memory is too small, anew with smaller chunks.

    Raises:
        InputError: one sample at a time is too much.
    """
    chunk = settings.chunk
    causal = run.objective(task).causal
    by_moment = kind == "fisher" and settings.estimate == "first_moment"
    while True:
        batches = _batches(run, kind, task, count, run.training.batch_size if by_moment else chunk)
        try:
            if kind == "gram":
                return input_grams(whole, batches)
            if by_moment:
                moments = first_moment(whole, batches, causal=causal, chunk=chunk)
                return {name: moment.square() for name, moment in moments.items()}
            return diagonal_fisher(
                whole, batches, causal=causal, sampled=settings.sampled, seed=run.seed, chunk=chunk
            )
        except torch.OutOfMemoryError as error:
            if chunk == 1:
                raise InputError(
                    f"the {kind} of one sample of {task} does not fit the device's memory "
                    f"({str(error).splitlines()[0]}): take a merger that needs none, or set device=cpu"
                ) from None
            chunk //= 2
            log.warning("out of memory in the %s of %s: trying curvature.chunk=%d", kind, task, chunk)
        torch.cuda.empty_cache()


def prefix(whole: nn.Module, model: nn.Module) -> str:
    """What stands before the names of `model`'s parameters in `whole`, which holds it."""
    name = next(name for name, module in whole.named_modules() if module is model)
    return f"{name}." if name else ""


def _batches(run: Context, kind: str, task: str, count: int, size: int) -> Iterator[Batch]:
    """The first `count` training samples of the run's shuffle, on its device.

    For Grams, in which every row of a batch counts, texts come one by one: then none is padded.
    """
    objective = run.objective(task)
    order = torch.randperm(run.tasks[task].count("train"), generator=torch.Generator().manual_seed(run.seed))
    if kind == "gram" and isinstance(objective.batch("train", order[:1]), Mapping):
        size = 1
    parts = order[:count].split(size)
    for part in track(parts, f"{kind} of {task}", disable=not run.cfg.progress, transient=True):
        yield to_device(objective.batch("train", part), run.device)


def _of_all_tensors(run: Context, fisher: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Fisher under the names of the base, zero where nothing was trained."""
    names = {parameter: name for name, parameter in run.model.state_dict(keep_vars=True).items()}
    named = {names[p]: fisher[own] for own, p in run.model.named_parameters() if own in fisher}
    still = {
        n: torch.zeros_like(t) for n, t in run.base_state.items() if t.is_floating_point() and n not in named
    }
    return named | still
