"""Stage merge: each merger's coefficient chosen on validation, and its model, into the store."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.evaluation import Candidate, choose_best, score, search_grid, search_halving
from mergekit_lab.evaluation.search import Score
from mergekit_lab.merging import Method, merge_state_dicts
from mergekit_lab.runs.adaptive import learn, learned_method, learning_content, learns
from mergekit_lab.runs.context import Context
from mergekit_lab.runs.evaluate import Subject, evaluate, peak_memory
from mergekit_lab.runs.setup import Merger
from mergekit_lab.schema.check import build
from mergekit_lab.store import Artifact, content_key
from mergekit_lab.store.store import Workplace

log = logging.getLogger(__name__)


def stage_merge(run: Context) -> None:
    """Choose each coefficient and write each merged model, on the run's devices."""
    if not run.mergers:
        log.info("merge: this run names no merger; set merger=NAME")
    run.spread(stage_merge, [label for label in run.mergers if run.mine(label) and not _is_merged(run, label)])
    for label, merger in run.mergers.items():
        if not run.mine(label):
            continue
        if merger.searched:
            found = search(run, merger).info
            log.info(
                "%s: the best of %d coefficients keeps %.1f %% of the experts' accuracy on validation",
                label,
                len(found["curve"]),
                100 * found["normalized"],
            )
        if learns(merger):
            learn(run, merger)
        merged = run.obtain("merged", merged_content(run, merger), _maker(run, merger))
        alpha = chosen_coefficient(run, merger)
        how = "found in the store" if merged.reused else f"{merged.info['wall_seconds']:.1f} s"
        log.info("%s: %s%s", label, how, "" if alpha is None else f", coefficient {alpha:g}")


def _is_merged(run: Context, label: str) -> bool:
    merger = run.mergers[label]
    if merger.searched and not run.store.find("searches", run.search_content(merger)):
        return False
    return run.store.find("merged", merged_content(run, merger)) is not None


def search(run: Context, merger: Merger) -> Artifact:
    """The validation curve of a merger, as an artifact: `info["curve"]` and `info["coefficient"]`."""
    return run.obtain("searches", run.search_content(merger), lambda place: _search(run, merger))


def chosen_fields(run: Context, merger: Merger) -> dict[str, Any]:
    """The values of a method's searched fields; empty where only the coefficient is, or nothing."""
    if not merger.searched:
        return {}
    found = run.made_earlier("searches", run.search_content(merger), merger.label, "merge")
    return dict(found.info.get("fields", {}))


def chosen_coefficient(run: Context, merger: Merger) -> float | None:
    """The merger's coefficient: the searched one, else the method's own; None where it has none."""
    if merger.searched:
        return float(
            run.made_earlier("searches", run.search_content(merger), merger.label, "merge").info["coefficient"]
        )
    return _own_coefficient(merger.method)


def _own_coefficient(method: Method) -> float | None:
    inner = getattr(method, "inner", None)
    if inner is not None:
        return _own_coefficient(inner)
    value = getattr(method, "coefficient", ())
    return method.scale if value is None or isinstance(value, int | float) else None


def merged_content(run: Context, merger: Merger) -> dict[str, Any]:
    """What names the merged model: everything that decides it, what is chosen or learned included."""
    chosen: dict[str, Any] = {"coefficient": chosen_coefficient(run, merger)} if merger.searched else {}
    if learns(merger):
        chosen["coefficients"] = content_key(learning_content(run, merger))
    return run.merge_content(merger, {**merger.content, **chosen_fields(run, merger)}) | chosen


def merge_experts(
    run: Context,
    method: Method,
    tasks: Iterable[str] | None = None,
    notes: dict[str, dict[str, object]] | None = None,
) -> dict[str, Any]:
    """The state dict that a method makes of the run's experts, or of those of some tasks, in memory."""
    names = list(run.tasks if tasks is None else tasks)
    experts: dict[str, Path] = {task: run.expert(task).file("model.safetensors") for task in names}
    statistics: dict[str, dict[str, Path]] = {
        kind: {task: run.side(kind, task).file(f"{kind}.safetensors") for task in names}
        for kind in method.side_inputs
    }
    return merge_state_dicts(
        run.base_state, experts, method, statistics=statistics, device=run.devices, notes=notes
    )


def _maker(run: Context, merger: Merger) -> Any:
    def make(place: Workplace) -> Mapping[str, Any]:
        alpha = chosen_coefficient(run, merger)
        method = _method(merger, chosen_fields(run, merger))
        if merger.searched and alpha is not None:
            method = method.at(alpha)
        if learns(merger):
            method = learned_method(run, merger)
        notes: dict[str, dict[str, object]] = {}
        if run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.device)
        write_tensors(place.out / "model.safetensors", merge_experts(run, method, notes=notes))
        (place.out / "notes.json").write_text(json.dumps(notes, indent=1))
        return {
            "method": repr(method),
            "coefficient": alpha,
            "peak_memory_bytes": peak_memory(run.device),
        }

    return make


def _search(run: Context, merger: Merger) -> Mapping[str, Any]:
    """Merge once a variant, at coefficient 1; every candidate is one pass of arithmetic and its evaluation."""
    experts = {
        task: float(evaluate(run, Subject.expert(run, task), task, "validation").info["value"])
        for task in run.tasks
    }
    curve: list[Candidate] = []
    for fields in run.search.variants(merger.content):
        at = _scores_of(run, merge_experts(run, _method(merger, fields).at(1.0)))
        reached = choose_best(curve).normalized if curve else -math.inf
        label = " ".join([f"coefficient of {merger.label}", *(f"{n}={v}" for n, v in fields.items())])
        grid = run.search.coefficients
        if run.search.method == "halving":
            found = search_halving(grid, experts, at, refine=run.search.refine, reached=reached)
        else:
            shown = track(grid, label, disable=not run.cfg.progress, transient=True)
            found = search_grid(
                shown, experts, at, prune=run.search.prune, patience=run.search.patience, reached=reached
            )
        curve += [replace(candidate, fields=fields) for candidate in found]
    best = choose_best(curve)
    points: list[dict[str, Any]] = [{**asdict(c), "values": dict(c.values)} for c in curve]
    return {
        "coefficient": best.coefficient,
        "fields": dict(best.fields),
        "normalized": best.normalized,
        "curve": points,
    }


def _scores_of(run: Context, unit: Mapping[str, Tensor]) -> Callable[[float], Score]:
    """The validation scores of `θ0 + α Δ` as functions of α, from the model merged at coefficient 1."""
    moved = {n: t for n, t in unit.items() if t.is_floating_point()}
    delta = {n: (t.double() - run.base_state[n].double()).to(run.device) for n, t in moved.items()}
    base = {n: run.base_state[n].double().to(run.device) for n in moved}

    def at(alpha: float) -> Score:
        candidate = {n: (base[n] + alpha * delta[n]).to(moved[n].dtype) for n in moved}
        run.model.load_state_dict(dict(unit) | candidate)
        return lambda task, share: (
            score(
                run.model,
                run.objective(task),
                "validation",
                index=_first(run.tasks[task].count("validation"), share),
                batch_size=run.cfg.evaluation_batch_size,
            ).value
        )

    return at


def _first(count: int, share: float) -> Tensor:
    """A share of a validation part, by the same shuffle for every candidate."""
    if share == 1:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[: max(1, round(share * count))].sort().values


def _method(merger: Merger, fields: Mapping[str, Any]) -> Method:
    """The merger's method with other values of some fields."""
    method: Method = build({**merger.content, **fields}) if fields else merger.method
    return method
