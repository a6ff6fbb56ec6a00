"""How the entries of task vectors are distributed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mergekit_lab.optim import fit_offset
from mergekit_lab.reporting.figures import chart_lines
from mergekit_lab.runs.analyses.contract import (
    Analysis,
    Data,
    Drawing,
    compute_each,
    describe_experts,
    read_states,
    subtract,
)
from mergekit_lab.runs.run import Run

SUM = "+sum"
KINDS = ("laplace", "gaussian")
"""Distributions that are fitted to entries."""


@dataclass(frozen=True)
class EntryDistribution(Analysis):
    """Densities of each task vector's entries and of the sum's, beside a fitted Laplace and a normal one.

    MergOPT, Figures 1 (the sum) and 3 and Table 10 (each). Tensors that no expert moved are left out.

    Args:
        bins: of the histogram.
        share: of the entries, the smallest ones, that the histogram reaches, in (0, 1].
    """

    bins: Annotated[int, Ge(2)] = 101
    share: Annotated[float, Gt(0), Le(1)] = 0.99

    def describe_content(self, run: Run) -> dict[str, Any]:
        return {
            "analysis": "distribution",
            "arithmetic": "float32",
            "bins": self.bins,
            "share": self.share,
            **describe_experts(run, run.tasks),
        }

    def compute(self, run: Run, resume: Path) -> Data:
        ends = read_states(run, run.tasks)
        base = {name: tensor for name, tensor in run.base_state.items() if tensor.is_floating_point()}
        changed = [n for n, t in base.items() if any(not torch.equal(end[n], t) for end in ends.values())]

        def compute(name: str) -> Data:
            added = list(ends.values()) if name == SUM else [ends[name]]
            deltas = [torch.stack([subtract(end[n], base[n]) for end in added]).sum(dim=0) for n in changed]
            return self.measure_entries(torch.cat([delta.flatten() for delta in deltas]))

        return compute_each(run, resume, [*ends, SUM], compute, "task vectors")

    def measure_entries(self, entries: Tensor) -> Data:
        """Their histogram, and the distributions fitted to them."""
        reach = float(entries.abs().kthvalue(max(1, int(self.share * len(entries)))).values)
        reach = reach or float(entries.abs().max()) or 1.0
        width = 2 * reach / self.bins
        counts = torch.histc(entries, self.bins, -reach, reach)
        return {
            "bins": [-reach + (i + 0.5) * width for i in range(self.bins)],
            "density": (counts.double() / (len(entries) * width)).tolist(),
            **fit_entries(entries),
        }

    def draw(self, data: Data) -> Drawing:
        panels = []
        for label, entry in sorted(data.items(), key=lambda item: item[0] != SUM):
            x, fits = entry["bins"], entry["fits"]
            curves = {"entries": (x, entry["density"])}
            for kind in KINDS:
                name = f"{kind}, K–S {fits[kind]['ks_distance']:.3f}"
                curves[name] = (x, [_evaluate_density(value, kind, fits[kind]) for value in x])
            title = "sum of all" if label == SUM else label
            title += f", {100 * entry['share_unchanged']:.0f} % unchanged"
            panels.append(chart_lines(title, "change of a weight", "density", curves))
        return Drawing("Entries of task vectors", panels)


def fit_entries(entries: Tensor) -> Data:
    """The distributions fitted to a task vector's entries, and the share of them that did not change."""
    fits = {kind: asdict(fit_offset([entries], kind)) for kind in KINDS}
    return {"fits": fits, "share_unchanged": float((entries == 0).double().mean())}


def _evaluate_density(x: float, kind: str, fit: Mapping[str, float]) -> float:
    scale = fit["scale"] or 1e-300
    z = abs(x - fit["loc"]) / scale
    if kind == "laplace":
        return math.exp(-z) / (2 * scale)
    return math.exp(-z * z / 2) / (math.sqrt(2 * math.pi) * scale)
