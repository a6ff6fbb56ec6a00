"""TIES: trim each task vector, elect a sign per entry, merge the entries that agree.

Yadav et al. 2023, "TIES-Merging", section 3. Public codes disagree on every step. A preset names whose
arithmetic runs; `PRESETS` has them row by row. Their results on the same task vectors have cosines of 0.74 to
0.90. Sources: prateeky2806/ties-merging (paper), yule-BUAA/MergeLM, tanganke/fusion_bench (sum),
apanariello4/core-space-merging (the paper's, tensor by tensor), arcee-ai/mergekit, huggingface/peft.

Trimming is exact in a few passes over blocks, whole model or tensor. Where `mergekit` would keep no entry of a
tensor, its releases before 0.1.5 refuse, and 0.1.5 keeps one; ours keeps none, as peft does.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Blocks, ScaledMethod, Site, Stream
from mergekit_lab.merging.selection import Largest, Pass, run_at_once, select_largest
from mergekit_lab.ranges import Share


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Whose arithmetic runs.

    Attributes:
        whole_model: trim over all entries of the model; else tensor by tensor.
        count: how many of `d` entries stay, from the density and `d`.
        weighed_votes: `λ_t` counts in the election too.
        even_sign: the sign where votes are even; None: that of the sum of all elected signs of the model.
        zero_majority_sign: the sign where that sum is 0 as well; 0 takes no entry, nor does "max".
        aggregator: "mean" or "sum" of the agreeing entries `λ_t δ_t`.
        divisor: of the mean: "count", or "weights": the sum of their `λ_t`.
        coefficient: `α` where none is set.

    The defaults are the paper's.
    """

    whole_model: bool = True
    count: Callable[[float, int], int] = lambda density, entries: min(entries, int(density * entries) + 1)
    weighed_votes: bool = True
    even_sign: float | None = None
    zero_majority_sign: float = -1.0
    aggregator: str = "mean"
    divisor: str = "count"
    coefficient: float = 1.0


def _count_from_above(density: float, entries: int) -> int:
    dropped = round(1 - density, 12)  # 1 - 0.8 is 0.19999999999999996, and the original is given 0.2
    return min(entries, entries - int(dropped * entries) + 1)


def _count_exactly(density: float, entries: int) -> int:
    return int(density * entries)


PRESETS = {
    "paper": Preset(),
    "mergelm": Preset(count=_count_from_above, zero_majority_sign=0.0),
    "sum": Preset(aggregator="sum", coefficient=0.3),
    "core_space": Preset(whole_model=False),
    "mergekit": Preset(whole_model=False, count=_count_exactly, even_sign=1.0, divisor="weights"),
    "peft": Preset(whole_model=False, count=_count_exactly, even_sign=1.0, weighed_votes=False),
}


def elect(votes: Tensor, election: str) -> Tensor:
    """Step 2: the sign of each entry `[n]` of `[T, n]`; 0 where the votes are even."""
    return (votes.sign() if election == "frequency" else votes).sum(dim=0).sign_()


def aggregate(values: Tensor, agree: Tensor, aggregator: str, weights: Tensor | None = None) -> Tensor:
    """Step 3: merge each entry from the experts that agree with its elected sign; 0 where none does.

    Args:
        values: `λ_t δ_t` `[T, n]`, trimmed.
        agree: 1 where an expert agrees, else 0, shaped like `values`.
        aggregator: "sum", "mean", or "max", the largest in magnitude.
        weights: `λ` `[T]`, whose sum over the agreeing experts divides the mean; None: their number does.
    """
    values = values * agree
    if aggregator == "max":
        most, least = values.amax(dim=0), values.amin(dim=0)
        return torch.where(most >= -least, most, least)
    total = values.sum(dim=0)
    if aggregator == "sum":
        return total
    shares = agree.sum(dim=0) if weights is None else weights @ agree
    return total.div_(shares.add_(1 - shares.abs().sign_()))


class _TIESSurvey:
    """Thresholds of all experts, and the majority sign.

    The sign takes a pass of its own, made once and only if votes are even.

    Args:
        largest: the thresholds.
        find: makes that pass.
    """

    def __init__(self, largest: Largest, find: Callable[[], float]) -> None:
        self.largest = largest
        self._find = find
        self._majority: float | None = None
        self._lock = threading.Lock()

    @property
    def majority(self) -> float:
        with self._lock:
            if self._majority is None:
                self._majority = self._find()
            return self._majority


@dataclass(frozen=True, kw_only=True)
class TIES(ScaledMethod):
    """TIES-Merging.

    Args:
        density: share of each task vector's entries to keep, in (0, 1]; 1 trims nothing.
        coefficient: `α`; None takes the preset's (1, or 0.3 for `sum`).
        preset: whose arithmetic: `"paper"` (the authors' code), `"mergelm"`, `"sum"`, `"core_space"`,
            `"mergekit"` or `"peft"`; see `PRESETS`.
        election: `"mass"` elects the sign of the sum, `"frequency"` that of the sum of signs.
        aggregator: `"mean"` or `"sum"` of the entries that agree, or `"max"`, the largest in magnitude; None
            takes the preset's. With `density=1`, `"max"` is what EMR-Merging (Huang et al. 2024) shares.
        count_buffers: whole-model presets only: integer buffers count among the d entries, as
            fusion_bench does when a model has some.
        weights: `λ_t`, 1 by default, of the trimmed task vectors.
    """

    density: Share = 0.2
    coefficient: float | None = None  # type: ignore[assignment]
    preset: Literal["paper", "mergelm", "sum", "core_space", "mergekit", "peft"] = "paper"
    election: Literal["mass", "frequency"] = "mass"
    aggregator: Literal["mean", "sum", "max"] | None = None
    count_buffers: bool = False

    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count_buffers and not self.rule.whole_model:
            raise InputError(f"count_buffers is defined for whole-model presets, not {self.preset!r}")

    @property
    def rule(self) -> Preset:
        return PRESETS[self.preset]

    @property
    def pools(self) -> bool:  # type: ignore[override]
        return self.rule.whole_model

    @property
    def scale(self) -> float:
        return self.rule.coefficient if self.coefficient is None else self.coefficient

    def count_kept(self, entries: int) -> int:
        """Entries that stay of a vector of `entries`."""
        return self.rule.count(self.density, entries)

    def survey(self, stream: Stream) -> Any:
        if not self.rule.whole_model or not stream.entries:
            return None
        shares = [share.read_blocks for share in stream.divide()]
        kept = self.count_kept(stream.entries + stream.buffer_entries * self.count_buffers)
        largest = select_largest(shares, kept, stream.entries, with_ties=True)
        return _TIESSurvey(largest, lambda: self._find_majority(largest, shares))

    def _find_majority(self, largest: Largest, shares: Sequence[Pass]) -> float:
        """The sign of the sum of all elected signs."""

        def add_signs(blocks: Pass) -> float:
            total = torch.zeros((), dtype=torch.float64)
            for _, deltas, site in blocks():
                signs = elect(site.weigh(largest.trim(deltas)), self.election)
                total = total.to(signs.device) + signs.sum(dtype=torch.float64)
            return float(total)

        total = sum(run_at_once(add_signs, shares))
        return float((total > 0) - (total < 0))

    def survey_tensor(self, name: str, entries: int, blocks: Blocks) -> Any:
        if self.rule.whole_model:
            return None
        kept, by_majority = self.count_kept(entries), self.rule.even_sign is None
        largest = select_largest([blocks], kept, entries, with_ties=by_majority)
        majority = self._find_majority(largest, [blocks]) if by_majority else 0.0
        return _TIESSurvey(largest, lambda: majority)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        survey: _TIESSurvey = site.survey if self.rule.whole_model else site.tensor
        trimmed = survey.largest.trim(deltas, site.offset)
        values = site.weigh(trimmed)
        votes = values if self.rule.weighed_votes else trimmed
        signs = self._break_ties(elect(votes, self.election), votes, survey)
        agree = (votes * signs).relu_().sign_()
        divisor = site.weights if self.rule.divisor == "weights" else None
        return aggregate(values, agree, self.aggregator or self.rule.aggregator, divisor)

    def _break_ties(self, signs: Tensor, votes: Tensor, survey: _TIESSurvey) -> Tensor:
        """Give signs to entries whose votes are even, where an expert has one to be taken."""
        is_even = 1 - signs.abs()
        if self.rule.even_sign is not None:
            return signs.add_(is_even, alpha=self.rule.even_sign)
        # a norm over dim 0 takes a CPU a hundred times as long as these two
        most = torch.maximum(votes.amax(dim=0), -votes.amin(dim=0))
        if bool((most * is_even).any()):
            # the largest is multiplied by the sign, where the mean and the sum only choose by it
            otherwise = 0.0 if self.aggregator == "max" else self.rule.zero_majority_sign
            signs.add_(is_even, alpha=survey.majority or otherwise)
        return signs
