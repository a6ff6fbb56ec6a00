"""Search, on validation samples, for what a merge leaves open: one coefficient for the whole model, or weights.

One coefficient serves all tasks, because one per task would not give one multi-task model. The criterion is the
mean over tasks of the value divided by the expert's value on the same split.

A grid is tried in order. A candidate that can no longer win is not finished, which changes no choice.
Successive halving tries many coefficients on a part of the validation samples and few on all of them, and then
halves the steps around the best. Many weights are found by CMA-ES (Hansen & Ostermeier 2001), with Optuna's
sampler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from mergekit_lab.errors import InputError
from mergekit_lab.kept_results import keep_results

Score = Callable[[str, float], float]
"""The value of a task on the first share, in (0, 1], of its validation samples."""


@dataclass(frozen=True)
class Candidate:
    """One point of the curve.

    Attributes:
        coefficient: `α`.
        values: by task, at most 1; of a pruned candidate only of the tasks that were scored.
        normalized: the criterion; of a pruned candidate an upper bound.
        pruned: whether it was dropped because it could not become the best.
        share: the part of the validation samples that was read.
        fields: the method's other fields, where these are searched too.
    """

    coefficient: float
    values: Mapping[str, float]
    normalized: float
    pruned: bool = False
    share: float = 1.0
    fields: Mapping[str, Any] = field(default_factory=dict)


def normalize(values: Mapping[str, float], expert_values: Mapping[str, float]) -> float:
    """Mean over tasks of `value / expert's value`.

    Raises:
        InputError: an expert's value is not positive, so nothing can be divided by it.
    """
    dead = [task for task, value in expert_values.items() if not value > 0]
    if dead:
        raise InputError(
            f"the experts of {', '.join(dead)} score 0 or less on validation, so results cannot be divided by "
            "theirs: train them longer, take another metric or the task's choices, leave the task out, or "
            "take every method's default coefficient (search=none)"
        )
    return sum(values[task] / expert_values[task] for task in values) / len(values)


def choose_best(curve: Sequence[Candidate]) -> Candidate:
    """The candidate with the highest criterion on all samples; among equals, the nearest to the base.

    Args:
        curve: at least one candidate was not pruned, and was scored on all samples.
    """
    whole = [c for c in curve if c.share == 1 and not c.pruned]
    return max(whole, key=lambda c: (c.normalized, -abs(c.coefficient)))


def search_grid(
    coefficients: Iterable[float],
    experts: Mapping[str, float],
    at: Callable[[float], Score],
    *,
    prune: bool = True,
    patience: int | None = None,
    reached: float = -math.inf,
) -> list[Candidate]:
    """The curve over a grid.

    Args:
        coefficients: candidates, in the order of trial.
        experts: the experts' values by task.
        at: makes the model at a coefficient, and returns its scores.
        prune: drop a candidate that could not become the best with perfect scores on its remaining tasks.
        patience: stop after so many candidates in a row that are worse than the best; None goes through all.
        reached: the criterion to beat, from another search.
    """
    normalize(dict.fromkeys(experts, 0.0), experts)
    curve: list[Candidate] = []
    best, worse = reached, 0
    for coefficient in coefficients:
        candidate = _make_candidate(coefficient, experts, at(coefficient), best if prune else -math.inf)
        curve.append(candidate)
        worse = 0 if candidate.normalized >= best and not candidate.pruned else worse + 1
        best = best if candidate.pruned else max(best, candidate.normalized)
        if patience is not None and worse >= patience:
            break
    return curve


def _make_candidate(
    coefficient: float, experts: Mapping[str, float], score: Score, best: float, share: float = 1.0
) -> Candidate:
    values: dict[str, float] = {}
    for task in experts:
        values[task] = score(task, share)
        bound = normalize({t: values.get(t, 1.0) for t in experts}, experts)
        if bound < best:
            return Candidate(coefficient, values, bound, pruned=True, share=share)
    return Candidate(coefficient, values, normalize(values, experts), share=share)


_SHARES = (0.25, 0.5, 1.0)
"""Of the validation samples that halving reads; after each but the last the better half goes on."""


def search_halving(
    coefficients: Sequence[float],
    experts: Mapping[str, float],
    at: Callable[[float], Score],
    *,
    refine: int = 2,
    reached: float = -math.inf,
) -> list[Candidate]:
    """The curve of successive halving, then of ever smaller steps around the best, within the grid's range.

    A criterion on a share of the samples is divided by the experts' values on all of them, so it only ranks
    candidates of the same share.

    Args:
        coefficients: two or more to begin with.
        experts, at, reached: as `search_grid` takes them.
        refine: how often the distance to the neighbors is halved around the best.
    """
    normalize(dict.fromkeys(experts, 0.0), experts)
    left, curve = list(coefficients), []
    for share in _SHARES:
        rung = [_make_candidate(c, experts, at(c), -math.inf, share) for c in left]
        curve += rung
        if share < 1:
            ranked = sorted(rung, key=lambda c: (-c.normalized, abs(c.coefficient)))
            left = [c.coefficient for c in ranked[: math.ceil(len(ranked) / 2)]]
    ordered = sorted(coefficients)
    step = min(b - a for a, b in pairwise(ordered))
    for _ in range(refine):
        step /= 2
        best = choose_best(curve)
        goal = max(best.normalized, reached)
        known = {c.coefficient for c in curve if c.share == 1}
        for coefficient in (best.coefficient - step, best.coefficient + step):
            if not ordered[0] <= coefficient <= ordered[-1] or coefficient in known:
                continue
            curve.append(_make_candidate(coefficient, experts, at(coefficient), goal))
    return curve


def import_optuna() -> ModuleType:
    """Optuna, with what its CMA-ES needs.

    Raises:
        InputError: one of both is not installed.
    """
    try:
        import cmaes  # noqa: F401
        import optuna
    except ImportError as error:
        raise InputError(
            f"search.method=cma_es needs optuna and cmaes ({error}): pip install 'mergekit_lab[evolve]'"
        ) from None
    return optuna


def search_cma_es(
    size: int,
    experts: Mapping[str, float],
    at: Callable[[Sequence[float]], Score],
    *,
    turns: Iterable[object],
    low: float = 0.0,
    high: float = 1.0,
    population: int | None = None,
    seed: int = 0,
    log: Path | None = None,
) -> list[Candidate]:
    """The candidates of CMA-ES over points of `size` numbers, each in `fields["point"]`.

    It begins in the middle of the range, with a sixth of it as its standard deviation. Every point follows from
    the seed and the values of those before it. So a search that was cut asks for the same points again, and
    finds their values in its log.

    Args:
        size: of a point, at least 2.
        experts: as `search_grid` takes them.
        at: makes the model of a point, and gives its scores.
        turns: yields once for each candidate, such as a progress bar.
        low, high: the range of every number.
        population: candidates per generation, at least 3; None takes `4 + 3 ln(size)`.
        seed: of the draws, 0 to 2**32 - 1.
        log: a file that keeps every point's values as JSON lines.

    Raises:
        InputError: fewer than two numbers, or Optuna or cmaes is not installed.
    """
    optuna = import_optuna()
    if size < 2:
        raise InputError("search.method=cma_es needs at least two weights: name more search.layers, or experts")
    normalize(dict.fromkeys(experts, 0.0), experts)

    def measure_once(point: Sequence[float]) -> dict[str, float]:
        score = at(point)
        return {task: score(task, 1.0) for task in experts}

    measure = keep_results(measure_once, log) if log else measure_once
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.CmaEsSampler(seed=seed, popsize=population)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    space = {str(position): optuna.distributions.FloatDistribution(low, high) for position in range(size)}
    study.enqueue_trial(dict.fromkeys(space, (low + high) / 2))
    curve: list[Candidate] = []
    for _ in turns:
        trial = study.ask(space)
        point = tuple(float(trial.params[name]) for name in space)
        values = measure(point)
        curve.append(Candidate(1.0, values, normalize(values, experts), fields={"point": list(point)}))
        study.tell(trial, curve[-1].normalized)
    return curve
