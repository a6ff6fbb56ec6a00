"""What the measured interference suggests, each with the numbers of this repository that it rests on.

A suggestion without a study behind it says so. New studies change the texts here and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

import torch

from mergekit_lab.analysis.interference import Interference

_SCALES = 3.0
_LONG = 2.0
_ALIKE = 0.05
"""Task vectors that lie nearer than this share of their length are those of one expert, stored twice."""


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


def advise(measured: Interference) -> list[Advice]:
    """Suggestions for merging these experts, the method first; or why there is nothing to merge."""
    norms = dict(zip(measured.experts, measured.total.norms.tolist(), strict=True))
    moved = [name for name, norm in norms.items() if norm > 0]
    advice = [
        Advice(
            text=f"leave {name} out, or check whether it is the right checkpoint",
            because=f"{name} equals the base: its task vector is zero",
            evidence="none needed",
        )
        for name in norms
        if name not in moved
    ]
    if len(moved) == 1:
        advice.append(
            Advice(
                text=f"nothing to merge: use {moved[0]} itself, or give two experts or more",
                because=f"{moved[0]} is the only expert with a task vector",
                evidence="none needed",
            )
        )
    if len(moved) < 2:
        return advice
    alike = _measure_gap(measured) < _ALIKE
    advice += [_advise_on_equals(measured)] if alike else [_advise_method(measured), _advise_on_rank(measured)]
    return [
        *advice,
        *_advise_scales(measured),
        *_advise_norms(norms),
        *([] if alike else [_advise_pairs(measured)]),
    ]


def _advise_on_equals(measured: Interference) -> Advice:
    return Advice(
        text="merger=average loses next to nothing here, and any one of them would do as well",
        because=f"they are nearly equal: cosines of {float(_select_pairs(measured).min()):.4f} or more between "
        f"task vectors, which lie at most {100 * _measure_gap(measured):.1f} % of their length apart",
        evidence="the average of equal models is that model. At a cosine of .99 that no longer holds: SGD's "
        "experts of a language model score 76.0, their average 42.9, TSV-M 57.9 (experiments/mergopt_smollm2)",
    )


def _advise_method(measured: Interference) -> Advice:
    cosine = float(_select_pairs(measured).mean())
    lost = 100 * float(_select_pairs(measured, measured.total.canceling).mean())
    return Advice(
        text="merger=tsvm, its coefficient searched on validation; merger=task_arithmetic if merging must be "
        "cheap; no plain average",
        because=f"the mean cosine of {len(measured.experts)} experts' task vectors is {cosine:.2f}, and "
        f"{lost:.0f} % of what they share cancels",
        evidence="three seeds each. Eight tasks (experiments/when_it_helps): of images, average 68.1, task "
        "arithmetic 79.6, TSV-M 86.2; of texts, MiniLM, 64.9, 72.0, 77.5. A language model, six tasks scored "
        "(experiments/mergopt_smollm2): experts 76.5, average 36.9, task arithmetic 39.6, TIES 45.6, TSV-M "
        "56.8 ± 1.9, EpiMer 58.9 ± 2.9. EpiMer needs Fishers; it is ahead of TSV-M in 46 of 75 merges of "
        "images, by .14 points, within chance, and in 1 of 3 of MiniLM. docs/which_to_choose.md says how sure "
        "this is",
    )


def _advise_on_rank(measured: Interference) -> Advice:
    spectra = [layer.spectra for layer in measured.layers if layer.spectra]
    if not spectra:
        return Advice("no rank to choose", "there are no matrices among the tensors", "none needed")
    energy = 100 * float(torch.stack([s.energy.mean() for s in spectra]).median())
    ranks = sorted({s.rank for s in spectra})
    called = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    return Advice(
        text="merger.rank: null for tsvm, all the directions that the experts can share; 32 for epimer",
        because=f"the {called} leading directions of a matrix hold {energy:.0f} % of its task vector (median)",
        evidence="with one direction TSV-M keeps 80.7 % of the experts' accuracy and EpiMer 78.1, with 32 "
        "95.8 and 94.9 (docs/gallery.md). With eight EpiMer loses nothing on images and 2.0 points on texts, "
        "with two 4.4 ± 1.2 and 6.2 ± 0.1 (experiments/when_it_helps)",
    )


def _advise_scales(measured: Interference) -> list[Advice]:
    low, high = float(measured.fisher_traces.min()), float(measured.fisher_traces.max())
    if high <= _SCALES * low:
        return []
    factor = high / max(low, 1e-300)
    return [
        Advice(
            text="merger.normalize=trace for mergers that read Fishers (epimer, fisher)",
            because=f"the Fishers' traces differ by a factor of {factor:.1f}, and the largest decides",
            evidence="EpiMer has 92.1 with normalize=trace and 68.6 without; the Fisher average 64.6 without, "
            "less than the plain average's 77.5 (README, docs/mergers.md). On eight tasks and three seeds "
            "EpiMer loses 25.5 ± 1.4 points without (experiments/when_it_helps)",
        )
    ]


def _advise_norms(norms: Mapping[str, float]) -> list[Advice]:
    typical = median_low(norms.values())
    return [
        Advice(
            text=f"look at {name} first: give it a smaller weight (merger.weights) or fewer training steps",
            because=f"its task vector is {norm / typical:.1f} times as long as the median one",
            evidence="not studied yet",
        )
        for name, norm in norms.items()
        if typical > 0 and norm > _LONG * typical
    ]


def _advise_pairs(measured: Interference) -> Advice:
    low, high = (float(x) for x in torch.aminmax(_select_pairs(measured)))
    return Advice(
        text="evaluate merges: the pairs above show where task vectors collide, not what a merge loses",
        because=f"cosines between {low:.2f} and {high:.2f}",
        evidence="over 28 pairs of experts of one optimizer, no measure of direction ranked what a merge "
        "loses: Spearman's ρ was −0.2 to 0.2, for predicted harm 0.1 (experiments/diagnose)",
    )


def _select_pairs(measured: Interference, matrix: torch.Tensor | None = None) -> torch.Tensor:
    """The entries of pairs of different experts that moved, by default their cosines."""
    moved = measured.total.norms > 0
    off = ~torch.eye(len(moved), dtype=torch.bool) & moved & moved[:, None]
    return (measured.total.cosine if matrix is None else matrix)[off]


def _measure_gap(measured: Interference) -> float:
    """The largest `‖δ_i − δ_j‖` of a pair that moved, as a share of the shorter of the two."""
    norms = measured.total.norms
    squares = norms.square() + norms.square()[:, None] - 2 * measured.total.dots
    shorter = torch.minimum(norms, norms[:, None]).clamp_min(1e-300)
    return float(_select_pairs(measured, squares.clamp_min(0).sqrt() / shorter).max())
