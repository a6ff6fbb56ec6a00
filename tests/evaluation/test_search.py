"""Searches find what the whole grid would find, and do less."""

import sys

import pytest

from mergekit_lab import InputError
from mergekit_lab.evaluation import Candidate, choose_best, search_cma_es, search_grid, search_halving

EXPERTS = {"a": 0.8, "b": 0.9, "c": 1.0}


class Curve:
    """Values that peak at 0.7 for every task, the peak a little apart; counts what is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, str, float]] = []

    def __call__(self, coefficient: float):
        def score(task: str, share: float) -> float:
            self.asked.append((coefficient, task, share))
            peak = {"a": 0.65, "b": 0.7, "c": 0.75}[task]
            return max(0.0, 0.8 - 2 * abs(coefficient - peak))

        return score


GRID = [i / 10 for i in range(1, 21)]


def test_pruning_asks_for_less_and_chooses_the_same() -> None:
    whole, cut = Curve(), Curve()
    all_of_it = search_grid(GRID, EXPERTS, whole, prune=False)
    pruned = search_grid(GRID, EXPERTS, cut)
    assert choose_best(pruned) == choose_best(all_of_it)
    assert choose_best(pruned).coefficient == 0.7
    assert len(cut.asked) < 0.75 * len(whole.asked)
    assert [c.coefficient for c in pruned] == GRID
    for candidate, full in zip(pruned, all_of_it, strict=True):
        assert candidate.normalized >= full.normalized - 1e-12 if candidate.pruned else candidate == full


def test_patience_ends_a_search_that_only_falls() -> None:
    curve = search_grid(GRID, EXPERTS, Curve(), patience=3)
    assert [c.coefficient for c in curve][-1] == 1.0
    assert choose_best(curve).coefficient == 0.7


def test_a_search_that_has_to_beat_another_finishes_no_candidate_below_it() -> None:
    curve = search_grid([0.1, 0.2], EXPERTS, Curve(), reached=0.9)
    assert all(candidate.pruned for candidate in curve)


def test_halving_looks_at_all_on_a_share_and_at_few_on_everything() -> None:
    seen = Curve()
    curve = search_halving(GRID, EXPERTS, seen, refine=0)
    counts = {share: sum(s == share for _, _, s in seen.asked) for share in (0.25, 0.5, 1.0)}
    assert counts == {0.25: 3 * 20, 0.5: 3 * 10, 1.0: 3 * 5}
    assert choose_best(curve).coefficient == 0.7


def test_refining_finds_a_peak_between_the_grid() -> None:
    coarse = [0.0, 0.5, 1.0]
    curve = search_halving(coarse, EXPERTS, Curve(), refine=4)
    assert abs(choose_best(curve).coefficient - 0.7) <= 0.07


def test_the_best_is_sought_among_what_was_wholly_evaluated() -> None:
    curve = [
        Candidate(0.1, {}, 0.99, share=0.25),
        Candidate(0.2, {}, 0.98, pruned=True),
        Candidate(0.3, {}, 0.5),
    ]
    assert choose_best(curve).coefficient == 0.3


@pytest.mark.parametrize("value", [0.0, -0.02])
def test_a_dead_expert_is_named_before_anything_is_evaluated(value: float) -> None:
    """A correlation below 0 would turn the order of the candidates round."""
    seen = Curve()
    for search in (search_grid, search_halving):
        with pytest.raises(InputError, match="experts of b score 0"):
            search(GRID, EXPERTS | {"b": value}, seen)  # type: ignore[operator]
    assert not seen.asked


@pytest.mark.parametrize("peak", [-1.0, 9.0])
def test_refining_stays_within_the_range_of_the_grid(peak: float) -> None:
    curve = search_halving([0.0, 1.0, 2.0], {"a": 1.0}, lambda alpha: lambda *_: 1 / (1 + abs(alpha - peak)))
    assert all(0 <= c.coefficient <= 2 for c in curve)
    assert choose_best(curve).coefficient == (0.0 if peak < 0 else 2.0)


OPTIMUM = (0.2, 0.9, 0.5)


def make_score(point):
    distance = sum((x - best) ** 2 for x, best in zip(point, OPTIMUM, strict=True))
    return lambda *_: 1 / (1 + distance)


def test_cma_es_begins_in_the_middle_and_finds_the_optimum() -> None:
    curve = search_cma_es(3, {"a": 1.0}, make_score, turns=range(120), seed=3)
    assert curve[0].fields["point"] == [0.5, 0.5, 0.5]
    assert choose_best(curve).fields["point"] == pytest.approx(OPTIMUM, abs=0.02)


def test_cma_es_that_was_killed_equals_one_that_was_not_and_measures_nothing_twice(tmp_path) -> None:
    log, asked = tmp_path / "trials.jsonl", []

    def score_at(point):
        asked.append(point)
        if len(asked) == 17:
            raise KeyboardInterrupt
        return make_score(point)

    def search(log, at=score_at):
        return search_cma_es(3, {"a": 0.5, "b": 1.0}, at, turns=range(40), population=6, seed=1, log=log)

    with pytest.raises(KeyboardInterrupt):
        search(log)
    log.write_bytes(log.read_bytes()[:-9])  # the last line was cut, too
    resumed = search(log)
    assert resumed == search(None, make_score)
    assert len(asked) == 17 + 40 - 15
    assert search(log) == resumed
    assert len(asked) == 17 + 40 - 15
    assert all(0.0 <= x <= 1.0 for each in resumed for x in each.fields["point"])


def test_cma_es_says_what_it_lacks(monkeypatch) -> None:
    with pytest.raises(InputError, match="at least two weights"):
        search_cma_es(1, {"a": 1.0}, make_score, turns=range(3))
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(InputError, match=r"'mergekit_lab\[evolve\]'"):
        search_cma_es(2, {"a": 1.0}, make_score, turns=range(3))
