"""How good a model is at a task, and which coefficient is best on validation."""

from mergekit_lab.evaluation.scores import Scores, score
from mergekit_lab.evaluation.search import Candidate, best_candidate, halve, normalized, search_grid

__all__ = ["Candidate", "Scores", "best_candidate", "halve", "normalized", "score", "search_grid"]
