"""What experts and merged models look like from inside. Torch only."""

from mergekit_lab.analysis.advice import Advice, advise
from mergekit_lab.analysis.interference import Interference, Layer, Spectra, Sums, measure_layers

__all__ = ["Advice", "Interference", "Layer", "Spectra", "Sums", "advise", "measure_layers"]
