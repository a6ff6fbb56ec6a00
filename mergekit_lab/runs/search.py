"""Choose on validation a merger's coefficient, and fields that are searched with it; or its weights (cma_es).

Artifacts declared here: `searches`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.checkpoints import open_checkpoint
from mergekit_lab.errors import InputError
from mergekit_lab.evaluation import Candidate, choose_best, score, search_cma_es, search_grid, search_halving
from mergekit_lab.evaluation.search import Score
from mergekit_lab.merging import merge_state_dicts
from mergekit_lab.merging.inputs import select_tensors
from mergekit_lab.ranges import require
from mergekit_lab.runs.combine import describe_merge, list_merge_inputs, merge_experts, move_models
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.mergers import Merger, make_weight_fields, say_fields
from mergekit_lab.runs.models import declare_evaluation, make_expert_model
from mergekit_lab.runs.nodes import Node, declare
from mergekit_lab.runs.run import MODEL, Run, move_state
from mergekit_lab.store import Artifact, Workspace, make_key


@declare
def declare_search(run: Run, label: str) -> Node:
    """A merger's search: the candidates in `info["curve"]`, and the chosen `info["coefficient"]`."""
    merger = run.mergers[label]
    return Node(
        "searches", f"the coefficient of {label}", "merge", label,
        decide=lambda: _search_content(run, merger),
        make=lambda workspace: _search(run, merger, workspace),
        needs=(*list_merge_inputs(run, merger), *_list_evaluations(run).values()),
        say=lambda search: _say(merger, search),
        list_points=lambda search: [
            {name: point[name] for name in ("coefficient", "normalized")} for point in list_curve(search)
        ],
    )  # fmt: skip


def _list_evaluations(run: Run) -> dict[str, Node]:
    """The evaluation of every expert on its own validation part. Candidates are normalized by it."""
    return {
        task: declare_evaluation(run, make_expert_model(run, task), task, "validation") for task in run.experts
    }


def check_patterns(run: Run) -> None:
    """Refuse name patterns that match no merged tensor of the base, before anything is trained.

    Raises:
        InputError: such a pattern in `search.layers`, or in a merger's weights.
    """
    layers = run.search.layers if any(merger.searched for merger in run.mergers.values()) else None
    by_tensor = [merger.method for merger in run.mergers.values() if merger.method.weights_by_tensor]
    if not (layers or by_tensor):
        return
    base = open_checkpoint(run.base_state, "the base")
    names = select_tensors(base.specs, base.find_ties(), None, ())
    for method in by_tensor:
        method.check_tensors(names)
    for pattern in layers or ():
        require(
            any(fnmatchcase(name, pattern) for name in names),
            "a pattern of search.layers", pattern, "one that matches a tensor that is merged",
        )  # fmt: skip


def _search_content(run: Run, merger: Merger) -> dict[str, Any]:
    tasks = run.experts
    variants = run.search.list_variants(merger.content)
    fields = {"fields": variants} if variants != [{}] else {}
    scoring = {task: how for task in tasks if (how := run.describe_scoring(task))}
    content = describe_merge(run, merger) | {"data": run.describe_data(tasks)}
    return content | run.search.describe_content() | fields | scoring


def read_fields(run: Run, merger: Merger) -> dict[str, Any]:
    """The chosen values of searched fields; empty if only the coefficient was searched, or nothing."""
    return dict(run.need(declare_search(run, merger.label)).info.get("fields", {})) if merger.searched else {}


def read_coefficient(run: Run, merger: Merger) -> float | None:
    """The merger's coefficient: the searched one, else the method's own; None if it has none."""
    if merger.searched:
        return float(run.need(declare_search(run, merger.label)).info["coefficient"])
    return merger.coefficient


def _search(run: Run, merger: Merger, workspace: Workspace) -> Mapping[str, Any]:
    """Score all candidates. In a grid, each variant is merged once, at coefficient 1, and then only scaled."""
    experts = {task: float(run.obtain(node).info["value"]) for task, node in _list_evaluations(run).items()}
    evolves = run.search.method == "cma_es"
    curve, recalled = _evolve(run, merger, experts, workspace) if evolves else ([], 0.0)
    for fields in () if curve else run.search.list_variants(merger.content):
        method = merger.with_fields(fields).with_coefficient(1.0)
        score_at = _make_scorer(run, merge_experts(run, method, stays=True))
        reached = choose_best(curve).normalized if curve else -math.inf
        title = " ".join([f"coefficient of {merger.label}", *(f"{n}={v}" for n, v in fields.items())])
        grid = run.search.coefficients or []
        if run.search.method == "halving":
            candidates = search_halving(grid, experts, score_at, refine=run.search.refine, reached=reached)
        else:
            candidates = search_grid(
                run.track(grid, title), experts, score_at,
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
        "wall_seconds": recalled,
    }


def list_curve(search: Artifact) -> list[dict[str, Any]]:
    """The candidates that were scored on all of validation."""
    return [p for p in search.info["curve"] if p.get("share", 1.0) == 1 and not p.get("pruned")]


def _say(merger: Merger, search: Artifact) -> str:
    chosen = say_fields(merger.content, search.info.get("fields", {}))
    count, kept = len(search.info["curve"]), 100 * search.info["normalized"]
    return (
        f"{merger.label}: the best of {count} candidates keeps {kept:.1f} % of the experts' accuracy on "
        f"validation{f': {chosen}' if chosen else ''}"
    )


def _evolve(
    run: Run, merger: Merger, experts: Mapping[str, float], workspace: Workspace
) -> tuple[list[Candidate], float]:
    """Score candidates of one weight for each expert and pattern of layers, as CMA-ES proposes them.

    Base and experts are moved to the device once, for all candidates.

    Returns:
        The candidates, and the seconds that stored searches took for those of them that they hold.
    """
    how = run.search
    base = move_state(run.base_state, run.device)
    models = {
        t: move_state(open_checkpoint(run.need(declare_expert(run, t)).find_file(MODEL)), run.device)
        for t in experts
    }
    names = [name for name, tensor in base.items() if tensor.is_floating_point()]
    patterns = list(how.layers or ())
    if any(not any(fnmatchcase(name, pattern) for pattern in patterns) for name in names):
        patterns.append("*")

    def weigh(point: Sequence[float]) -> dict[str, Any]:
        rows = [point[start : start + len(patterns)] for start in range(0, len(point), len(patterns))]
        by_pattern = {t: dict(zip(patterns, row, strict=True)) for t, row in zip(experts, rows, strict=True)}
        weights = by_pattern if how.layers else {t: row["*"] for t, row in by_pattern.items()}
        return make_weight_fields(merger.content, weights)

    known = _recall(run, merger)

    def score_at(point: Sequence[float]) -> Score:
        fields = weigh(point)
        if (key := make_key(fields)) in known:
            return lambda task, share: known[key][0][task]
        method = merger.with_fields(fields).with_coefficient(1.0)
        run.model.load_state_dict(merge_state_dicts(base, models, method, device=run.device))
        return _score_model(run)

    turns = run.track(range(how.trials), f"weights of {merger.label}")
    curve = search_cma_es(
        len(experts) * len(patterns), experts, score_at, turns=turns, low=how.low, high=how.high,
        population=how.population, seed=how.seed, log=workspace.resume / "trials.jsonl",
    )  # fmt: skip
    curve = [replace(candidate, fields=weigh(candidate.fields["point"])) for candidate in curve]
    return curve, sum(known[key][1] for each in curve if (key := make_key(each.fields)) in known)


def _recall(run: Run, merger: Merger) -> dict[str, tuple[Mapping[str, float], float]]:
    """Scores and seconds of candidates, by the key of their fields, from stored searches with another number of
    trials. A search's seconds are shared equally by its candidates.

    Their candidates are the same, because the number of trials does not change what CMA-ES proposes.
    """
    own, trials = declare_search(run, merger.label).key, run.search.trials
    try:
        stored = list(run.store.list_artifacts("searches"))
    except InputError:  # another user's, which may not be read
        return {}
    return {
        make_key(point["fields"]): (point["values"], search.info["wall_seconds"] / len(search.info["curve"]))
        for search in stored
        if make_key({**search.content, "trials": trials}) == own
        for point in search.info["curve"]
    }


def _make_scorer(run: Run, unit: Mapping[str, Tensor]) -> Callable[[float], Score]:
    """A function from `α` to the validation scores of `θ0 + α Δ`, given the model merged at `α = 1`."""
    floating = {n: t for n, t in unit.items() if t.is_floating_point()}
    moved = move_models(run, [])
    state = moved[0] if moved else run.base_state
    base = {n: state[n].to(run.device).double() for n in floating}
    delta = {n: t.to(run.device).double() - base[n] for n, t in floating.items()}

    def score_at(alpha: float) -> Score:
        candidate = {n: (base[n] + alpha * delta[n]).to(floating[n].dtype) for n in floating}
        run.model.load_state_dict(dict(unit) | candidate)
        return _score_model(run)

    return score_at


def _score_model(run: Run) -> Score:
    """The validation scores of the run's model as it is."""
    return lambda task, share: (
        score(
            run.find_model_to_score(task),
            run.make_objective(task),
            "validation",
            index=_take_first(run.tasks[task].count("validation"), share),
            batch_size=run.cfg.evaluation_batch_size,
        ).value
    )


def _take_first(count: int, share: float) -> Tensor:
    """The indices of a share of a validation part, the same for every candidate."""
    if share == 1:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[: max(1, round(share * count))].sort().values
