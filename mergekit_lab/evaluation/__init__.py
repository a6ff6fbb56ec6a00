"""How good a model is at a task, and which coefficient is best on validation."""

from mergekit_lab.evaluation.scores import Scores, score
from mergekit_lab.evaluation.search import Candidate, choose_best, normalize, search_grid, search_halving

__all__ = ["Candidate", "Scores", "choose_best", "normalize", "score", "search_grid", "search_halving"]
