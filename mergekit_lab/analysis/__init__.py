"""What experts and merged models look like from inside. Torch only."""

from mergekit_lab.analysis.advice import Advice, advise
from mergekit_lab.analysis.bound import Bound, measure_bound
from mergekit_lab.analysis.interference import Interference, Layer, Spectra, Sums, measure_layers

__all__ = [
    "Advice",
    "Bound",
    "Interference",
    "Layer",
    "Spectra",
    "Sums",
    "advise",
    "measure_bound",
    "measure_layers",
]
