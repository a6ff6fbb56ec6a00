"""What the measured interference suggests, each with the numbers of this repository that it rests on.

A suggestion without a study behind it says so. New studies change the texts here and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mergekit_lab.analysis.interference import Interference

_SCALES = 3.0
_LONG = 2.0


@dataclass(frozen=True)
class Advice:
    """One suggestion.

    Attributes:
        text: what to do.
        because: what was measured on these experts.
        evidence: which result of this repository says so, or that none does.
    """

    text: str
    because: str
    evidence: str


def advise(found: Interference) -> list[Advice]:
    """Suggestions for merging these experts, the method first."""
    return [_method(found), _rank(found), *_scales(found), *_norms(found), *_pairs(found)]


def _method(found: Interference) -> Advice:
    cosine, lost = _mean(found.total.cosine), 100 * _mean(found.total.cancelling)
    return Advice(
        text="merger=tsvm, its coefficient searched on validation; merger=task_arithmetic where a merge must "
        "be cheap; no plain average",
        because=f"{len(found.experts)} experts with a mean cosine of {cosine:.2f} between task vectors, which "
        f"lose {lost:.0f} % of what they share to opposite signs",
        evidence="test accuracy of average / task arithmetic / TSV-M, three seeds: 73.7 / 86.0 / 91.7 on four "
        "tasks, 68.3 / 79.9 / 86.3 on eight, with coefficients of 0.4 to 0.7 and 1.4 to 1.6 "
        "(experiments/pretrain_glyph_clip). That is one small image backbone: other models may differ",
    )


def _rank(found: Interference) -> Advice:
    spectra = [layer.spectra for layer in found.layers if layer.spectra]
    if not spectra:
        return Advice("no rank to choose", "there are no matrices among the tensors", "none needed")
    energy = 100 * float(torch.stack([s.energy.mean() for s in spectra]).median())
    ranks = sorted({s.rank for s in spectra})
    called = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    return Advice(
        text="merger.rank=null: all the directions that the experts can share",
        because=f"the {called} leading directions of a matrix hold {energy:.0f} % of its task vector (median)",
        evidence="the TSV-M numbers above are at rank null; no study here varies the rank yet",
    )


def _scales(found: Interference) -> list[Advice]:
    if not found.has_fishers:
        return []
    low, high = float(found.fisher_traces.min()), float(found.fisher_traces.max())
    if high <= _SCALES * low:
        return []
    factor = high / max(low, 1e-300)
    return [
        Advice(
            text="merger.normalise=trace where Fishers are read (epimer), or merger.normalise=true (fisher)",
            because=f"the Fishers' traces differ by a factor of {factor:.1f}, and the largest decides",
            evidence="EpiMer 92.1 with normalise=trace and 68.5 without; the Fisher average 64.6 without, "
            "below the plain average's 77.5 (README)",
        )
    ]


def _norms(found: Interference) -> list[Advice]:
    norms = found.total.norms
    typical = float(norms.median())
    return [
        Advice(
            text=f"look at {name} first: give it a smaller weight (merger.weights) or fewer training steps",
            because=f"its task vector is {float(norm) / typical:.1f} times as long as the median one",
            evidence="no study here yet",
        )
        for name, norm in zip(found.experts, norms, strict=True)
        if typical > 0 and float(norm) > _LONG * typical
    ]


def _pairs(found: Interference) -> list[Advice]:
    if len(found.experts) < 2:
        return []
    off = ~torch.eye(len(found.experts), dtype=torch.bool)
    low, high = (float(x) for x in torch.aminmax(found.total.cosine[off]))
    return [
        Advice(
            text="read the pairs as where task vectors collide, not as a forecast of accuracy: evaluate merges",
            because=f"cosines between {low:.2f} and {high:.2f}",
            evidence="over 28 pairs of experts the measures of direction ranked the cost of a merge with "
            "Spearman's ρ of 0.0 to 0.2, predicted harm with 0.1 (experiments/diagnose)",
        )
    ]


def _mean(matrix: torch.Tensor) -> float:
    """Over pairs of different experts; the only entry for one expert."""
    count = len(matrix)
    if count == 1:
        return float(matrix[0, 0])
    return float((matrix.sum() - matrix.trace()) / (count * (count - 1)))
