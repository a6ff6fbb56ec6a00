"""The choice of a merger's coefficient, and of fields searched with it, on validation.

Artifacts declared here: `searches`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from mergekit_lab.evaluation import Candidate, choose_best, score, search_grid, search_halving
from mergekit_lab.evaluation.search import Score
from mergekit_lab.runs.combine import merge_content, merge_experts, merge_inputs
from mergekit_lab.runs.mergers import Merger
from mergekit_lab.runs.models import evaluation_node, expert_model
from mergekit_lab.runs.nodes import Node, declare
from mergekit_lab.runs.run import Run
from mergekit_lab.store.store import Workspace


@declare
def search_node(run: Run, label: str) -> Node:
    """The validation curve of a merger: `info["curve"]`, and what was chosen, `info["coefficient"]`."""
    merger = run.mergers[label]
    return Node(
        "searches", f"the coefficient of {label}", "merge", label,
        decide=lambda: _search_content(run, merger),
        make=lambda workspace: _search(run, merger, workspace),
        needs=merge_inputs(run, merger),
    )  # fmt: skip


def _search_content(run: Run, merger: Merger) -> dict[str, Any]:
    tasks = run.experts
    variants = run.search.variants(merger.content)
    fields = {"fields": variants} if variants != [{}] else {}
    scoring = {task: how for task in tasks if (how := run.scoring_content(task))}
    content = merge_content(run, merger) | {"data": run.data_content(tasks)}
    return content | run.search.content() | fields | scoring


def read_fields(run: Run, merger: Merger) -> dict[str, Any]:
    """The values of a method's searched fields; empty where only the coefficient is, or nothing."""
    return dict(run.need(search_node(run, merger.label)).info.get("fields", {})) if merger.searched else {}


def read_coefficient(run: Run, merger: Merger) -> float | None:
    """The merger's coefficient: the searched one, else the method's own; None where it has none."""
    if merger.searched:
        return float(run.need(search_node(run, merger.label)).info["coefficient"])
    return merger.coefficient


def _search(run: Run, merger: Merger, workspace: Workspace) -> Mapping[str, Any]:
    """Merge once a variant, at coefficient 1; every candidate is one pass of arithmetic and its evaluation."""
    experts = {
        task: float(run.obtain(evaluation_node(run, expert_model(run, task), task, "validation")).info["value"])
        for task in run.experts
    }
    curve: list[Candidate] = []
    for fields in run.search.variants(merger.content):
        score_at = _scorer(run, merge_experts(run, merger.with_fields(fields).at(1.0)))
        reached = choose_best(curve).normalized if curve else -math.inf
        title = " ".join([f"coefficient of {merger.label}", *(f"{n}={v}" for n, v in fields.items())])
        grid = run.search.coefficients
        if run.search.method == "halving":
            candidates = search_halving(grid, experts, score_at, refine=run.search.refine, reached=reached)
        else:
            shown = track(grid, title, disable=not run.cfg.progress, transient=True)
            candidates = search_grid(
                shown, experts, score_at,
                prune=run.search.prune, patience=run.search.patience, reached=reached,
            )  # fmt: skip
        curve += [replace(candidate, fields=fields) for candidate in candidates]
    best = choose_best(curve)
    points: list[dict[str, Any]] = [{**asdict(c), "values": dict(c.values)} for c in curve]
    return {
        "coefficient": best.coefficient,
        "fields": dict(best.fields),
        "normalized": best.normalized,
        "curve": points,
    }


def _scorer(run: Run, unit: Mapping[str, Tensor]) -> Callable[[float], Score]:
    """The validation scores of `θ0 + α Δ` as functions of α, from the model merged at coefficient 1."""
    floating = {n: t for n, t in unit.items() if t.is_floating_point()}
    delta = {n: (t.double() - run.base_state[n].double()).to(run.device) for n, t in floating.items()}
    base = {n: run.base_state[n].double().to(run.device) for n in floating}

    def score_at(alpha: float) -> Score:
        candidate = {n: (base[n] + alpha * delta[n]).to(floating[n].dtype) for n in floating}
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

    return score_at


def _first(count: int, share: float) -> Tensor:
    """A share of a validation part, by the same shuffle for every candidate."""
    if share == 1:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[: max(1, round(share * count))].sort().values
