"""How good a model is at a task, and which coefficient is best on validation."""

from mergekit_lab.evaluation.accuracy import accuracy
from mergekit_lab.evaluation.search import Candidate, best_candidate, normalised

__all__ = ["Candidate", "accuracy", "best_candidate", "normalised"]
