"""Stage curvature: the Fishers that the run's mergers ask for, into the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from rich.progress import track

from mergekit_lab.backbones import Classifier
from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.curvature import diagonal_fisher
from mergekit_lab.stages.context import Context, load_state
from mergekit_lab.store.store import Workplace

log = logging.getLogger(__name__)


def stage_curvature(run: Context) -> None:
    askers = [label for label, merger in run.mergers.items() if merger.method.side_inputs]
    if not askers:
        log.info("curvature: no merger of this run needs any")
        return
    for task in run.tasks:
        artefact = run.obtain("fishers", run.fisher_content(task), _maker(run, task))
        how = "found in the store" if artefact.reused else f"{artefact.info['wall_seconds']:.1f} s"
        log.info("Fisher of %s: %s", task, how)


def _maker(run: Context, task: str) -> Any:
    def make(place: Workplace) -> Mapping[str, Any]:
        expert = run.expert(task)
        encoder = run.encoder
        encoder.load_state_dict(load_state(expert))
        split = run.tasks[task].split("train")
        order = torch.randperm(len(split), generator=torch.Generator().manual_seed(run.seed))
        chosen = order[: run.cfg.curvature.samples]
        chunk = run.cfg.curvature.chunk
        batches = (
            (split.images[part].to(run.device) / 255, split.labels[part].to(run.device))
            for part in track(
                chosen.split(chunk), f"Fisher of {task}", disable=not run.cfg.progress, transient=True
            )
        )
        fisher = diagonal_fisher(
            Classifier(encoder, run.head(task)).to(run.device),
            batches,
            sampled=run.cfg.curvature.sampled,
            seed=run.seed,
            chunk=chunk,
        )
        names = {parameter: name for name, parameter in encoder.state_dict(keep_vars=True).items()}
        named = {names[p]: fisher[f"encoder.{own}"] for own, p in encoder.named_parameters()}
        still = {
            n: torch.zeros_like(t)
            for n, t in run.base_state.items()
            if t.is_floating_point() and n not in named
        }
        write_tensors(place.out / "fisher.safetensors", named | still)
        return {"samples": len(chosen), "trace": float(sum(v.sum() for v in named.values()))}

    return make
