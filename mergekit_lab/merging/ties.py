"""TIES: trim each task vector, elect a sign per entry, merge the entries that agree.

Yadav et al. 2023, "TIES-Merging", section 3. Public codes disagree on every step, so a preset names
whose arithmetic runs; on the same task vectors their results have cosines of 0.74 to 0.90.

| preset    | trimmed over | kept of d entries         | a sum of 0     | merged as                           |
|-----------|--------------|---------------------------|----------------|-------------------------------------|
| paper     | whole model  | min(d, int(density·d)+1)  | majority sign  | mean of the agreeing                |
| mergelm   | whole model  | d − int((1−density)·d)+1  | majority sign  | mean of the agreeing                |
| sum       | whole model  | as paper                  | majority sign  | sum of the agreeing, α = 0.3        |
| mergekit  | each tensor  | int(density·n)            | positive       | Σ λ_t δ_t / Σ λ_t over the agreeing |
| peft      | each tensor  | int(density·n)            | positive       | Σ λ_t δ_t / number of the agreeing  |

Sources: prateeky2806/ties-merging (paper), yule-BUAA/MergeLM, tanganke/fusion_bench (sum),
arcee-ai/mergekit, huggingface/peft. Trimming is exact in a few passes over blocks, whole model or tensor.
The majority sign is the sign of the sum of all elected signs; where that is 0, `paper` and `sum` take the
negative entries, `mergelm` takes none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import Blocks, Method, Site, Stream, require, require_choice
from mergekit_lab.merging.selection import Largest, at_once, select_largest

_WHOLE_MODEL = ("paper", "mergelm", "sum")
_PRESETS = (*_WHOLE_MODEL, "mergekit", "peft")
_ELECTIONS = ("mass", "frequency")


def _task_vectors(stream: Stream) -> Iterator[Tensor]:
    for _, deltas, _ in stream.blocks():
        yield deltas


class _Survey:
    """The thresholds of all experts, and the majority sign, which takes a pass of its own when it is needed.

    Args:
        largest: the thresholds.
        find: makes that pass.
    """

    def __init__(self, largest: Largest, find: Callable[[Largest], float]) -> None:
        self.largest = largest
        self._find = find
        self._found: float | None = None
        self._lock = threading.Lock()

    @property
    def majority(self) -> float:
        with self._lock:
            if self._found is None:
                self._found = self._find(self.largest)
            return self._found


@dataclass(frozen=True, kw_only=True)
class TIES(Method):
    """TIES-Merging.

    Args:
        density: share of entries that stay in each task vector, in (0, 1]; 1 trims nothing.
        coefficient: `α`; None takes the preset's (1, or 0.3 for `sum`).
        preset: whose arithmetic, see the module's table.
        elect: `"mass"` elects the sign of the sum, `"frequency"` that of the sum of signs; None takes
            the preset's, which is mass.
        normalize: `mergekit` only: divide by the weights of the agreeing entries.
        count_buffers: whole-model presets only: integer buffers count among the d entries, as
            fusion_bench does when a model has some.
        weights: `λ_t`, 1 by default. Whole-model presets scale the trimmed task vectors by it.
    """

    density: float = 0.2
    coefficient: float | None = None
    preset: str = "paper"
    elect: str | None = None
    normalize: bool = True
    count_buffers: bool = False

    def __post_init__(self) -> None:
        require(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        require_choice("preset", self.preset, _PRESETS)
        if self.elect is not None:
            require_choice("elect", self.elect, _ELECTIONS)
        if not self.normalize and self.preset != "mergekit":
            raise InputError(f"normalize=False is defined for the preset 'mergekit', not {self.preset!r}")
        if self.count_buffers and self.preset not in _WHOLE_MODEL:
            raise InputError(f"count_buffers is defined for whole-model presets, not {self.preset!r}")

    @property
    def elementwise(self) -> bool:
        return True

    @property
    def pools(self) -> bool:
        return self.preset in _WHOLE_MODEL

    @property
    def scale(self) -> float:
        default = 0.3 if self.preset == "sum" else 1.0
        return default if self.coefficient is None else self.coefficient

    def at(self, coefficient: float) -> Self:
        return replace(self, coefficient=coefficient)

    def kept(self, entries: int) -> int:
        """Entries that stay of a vector of `entries`."""
        if self.preset in ("mergekit", "peft"):
            return int(self.density * entries)
        if self.preset == "mergelm":
            return min(entries, entries - int((1 - self.density) * entries) + 1)
        return min(entries, int(self.density * entries) + 1)

    def survey(self, stream: Stream) -> Any:
        if self.preset not in _WHOLE_MODEL or not stream.entries:
            return None
        largest = select_largest(
            [partial(_task_vectors, share) for share in stream.shares()],
            self.kept(stream.entries + stream.buffer_entries * self.count_buffers),
            stream.entries,
            with_ties=True,
        )
        return _Survey(largest, lambda found: self._majority(stream, found))

    def _majority(self, stream: Stream, largest: Largest) -> float:
        def balance(share: Stream) -> float:
            signs_of_all = torch.zeros((), dtype=torch.float64)
            for _, deltas, site in share.blocks():
                signs = self._elect(site.weigh(largest.of(deltas)))
                signs_of_all = signs_of_all.to(signs.device) + signs.sum(dtype=torch.float64)
            return float(signs_of_all)

        total = sum(at_once(balance, stream.shares()))
        return float((total > 0) - (total < 0))

    def survey_tensor(self, name: str, entries: int, blocks: Blocks) -> Any:
        if self.preset in _WHOLE_MODEL:
            return None
        return select_largest([lambda: (deltas for deltas, _ in blocks())], self.kept(entries), entries)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        if self.preset in _WHOLE_MODEL:
            return self._merge_whole(site.weigh(site.survey.largest.of(deltas)), site.survey)
        return self._merge_tensor(site.tensor.of(deltas, site.offset), site)

    def _elect(self, values: Tensor) -> Tensor:
        counted = values.sign() if self.elect == "frequency" else values
        return counted.sum(dim=0).sign_()

    def _merge_whole(self, trimmed: Tensor, survey: _Survey) -> Tensor:
        signs = self._elect(trimmed)
        open_ = 1 - signs.abs()
        # a norm over dim 0 takes a CPU a hundred times as long as these two
        most = torch.maximum(trimmed.amax(dim=0), -trimmed.amin(dim=0))
        if bool((most * open_).any()):
            undecided = survey.majority or (0.0 if self.preset == "mergelm" else -1.0)
            signs += open_ * undecided
        agreeing = (trimmed * signs).relu_()
        total = agreeing.sum(dim=0).mul_(signs)
        return total if self.preset == "sum" else total.div_(agreeing.sign_().sum(dim=0).clamp_(min=1))

    def _merge_tensor(self, trimmed: Tensor, site: Site) -> Tensor:
        scaled = site.weigh(trimmed)
        votes = trimmed if self.preset == "peft" else scaled
        signs = self._elect(votes).add_(0.5).sign_()
        agree = (votes * signs).relu_().sign_()
        total = (scaled * agree).sum(dim=0)
        if self.preset == "peft":
            return total.div_(agree.sum(dim=0).clamp_(min=1))
        if not self.normalize:
            return total
        shares = site.weights @ agree
        return total.div_(shares.add_(1 - shares.abs().sign_()))  # 1 where nothing agrees
