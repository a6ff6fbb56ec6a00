"""How good a model is at a task, and which coefficient is best on validation."""

from mergekit_lab.evaluation.harness import load_harness_task, score_with_harness
from mergekit_lab.evaluation.scores import Scores, score
from mergekit_lab.evaluation.search import (
    Candidate,
    choose_best,
    normalize,
    search_cma_es,
    search_grid,
    search_halving,
)

__all__ = [
    "Candidate",
    "Scores",
    "choose_best",
    "load_harness_task",
    "normalize",
    "score",
    "score_with_harness",
    "search_cma_es",
    "search_grid",
    "search_halving",
]
