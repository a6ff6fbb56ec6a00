"""What experts and merged models look like from inside. Torch only."""

from mergekit_lab.analysis.advice import Advice, advise
from mergekit_lab.analysis.bound import measure_bound
from mergekit_lab.analysis.interference import Interference, Layer, measure_layers

__all__ = ["Advice", "Interference", "Layer", "advise", "measure_bound", "measure_layers"]
