"""The task vectors themselves, and what they do to features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import MinLen
from torch import Tensor

from mergekit_lab.analysis import Interference, measure_layers
from mergekit_lab.analysis.interference import encode_sums
from mergekit_lab.analysis.plane import Weights, cross_task_linearity, find_blocks
from mergekit_lab.merging import TaskArithmetic
from mergekit_lab.merging.inputs import open_inputs
from mergekit_lab.reporting.figures import chart_lines, chart_matrix
from mergekit_lab.runs.analyses.contract import (
    Analysis,
    Count,
    Data,
    Drawing,
    OnSamples,
    choose_pairs,
    compute_each,
    describe_experts,
    read_states,
    subtract,
)
from mergekit_lab.runs.analyses.distribution import KINDS, fit_entries
from mergekit_lab.runs.run import Run

ALL = "+all"
"""The cell of all task vectors together."""


@dataclass(frozen=True)
class TaskVectors(Analysis):
    """Norms, cosines, sign conflicts, spectra, and the distribution of entries.

    Args:
        rank: leading singular vectors of a matrix that are compared.
        values: singular values of a matrix that are kept for the figure, at most.
    """

    rank: Count = 16
    values: Count = 64

    def describe_content(self, run: Run) -> dict[str, Any]:
        return {
            "analysis": "task_vectors",
            "arithmetic": "float32",
            "rank": self.rank,
            "values": self.values,
            **describe_experts(run, run.tasks),
        }

    def compute(self, run: Run, resume: Path) -> Data:
        ends = read_states(run, run.tasks)
        inputs = open_inputs(run.base_state, ends, TaskArithmetic())

        def measure_all() -> Data:
            interference = Interference(tuple(ends), has_fishers=False)
            for layer, traces in measure_layers(inputs, rank=self.rank, device=run.device):
                interference.add(layer, traces)
            layers = [layer.to_json() for layer in interference.layers]
            overall = encode_sums(interference.total)
            return {"overall": overall, "base_norm": interference.base_norm, "layers": layers}

        def measure(task: str) -> Data:
            if task == ALL:
                return measure_all()
            delta = {name: subtract(ends[task][name], run.base_state[name]) for name in inputs.merged}
            entries = torch.cat([d.flatten() for d in delta.values()])  # one pass, not one a tensor
            return {"spectrum": self.measure_spectrum(delta), **fit_entries(entries)}

        parts = compute_each(run, resume, [ALL, *ends], measure, "task vectors")
        return {
            "experts": list(ends),
            **parts[ALL],
            "spectra": {task: parts[task]["spectrum"] for task in ends},
            "fits": {task: parts[task]["fits"] for task in ends},
            "share_unchanged": {task: parts[task]["share_unchanged"] for task in ends},
        }

    def measure_spectrum(self, delta: Mapping[str, Tensor]) -> list[float]:
        """Singular values over the largest, the mean over matrices that have so many."""
        matrices = [d.float() for d in delta.values() if d.dim() == 2 and min(d.shape) > 1]
        sides = [min(d.shape) for d in matrices]
        if not matrices:
            return []
        count = min(self.values, max(sides))
        rows = [
            torch.linalg.svdvals(d)[:count] for d, side in zip(matrices, sides, strict=True) if side >= count
        ]
        return torch.stack([row / row[0].clamp_min(1e-30) for row in rows]).mean(dim=0).tolist()

    def draw(self, data: Data) -> Drawing:
        names, overall = data["experts"], data["overall"]
        matrices = [layer for layer in data["layers"] if "overlap" in layer]
        panels = [
            chart_matrix("cosine", names, overall["cosine"], signed=True),
            chart_matrix("sign conflict", names, overall["sign_conflict"]),
        ]
        if matrices:
            overlap = torch.tensor([layer["overlap"] for layer in matrices]).mean(dim=0)
            panels.append(chart_matrix("overlap of leading subspaces", names, overlap.tolist()))
            depth = list(range(len(matrices)))
            ranks = {n: (depth, [layer["stable_rank"][t] for layer in matrices]) for t, n in enumerate(names)}
            panels.append(chart_lines("stable rank", "matrix, in the model's order", "‖δ‖² / σ₁²", ranks))
            curves = {n: (list(range(1, len(v) + 1)), v) for n, v in data["spectra"].items()}
            title = "spectrum, mean over matrices"
            panels.append(chart_lines(title, "singular value", "σ / σ₁", curves, logarithmic=True))
        positions = list(range(len(names)))
        still = {"unchanged": (positions, [data["share_unchanged"][n] for n in names])}
        far = {kind: (positions, [data["fits"][n][kind]["ks_distance"] for n in names]) for kind in KINDS}
        panels += [
            chart_lines("weights that did not move", "", "share of entries", still, labels=names),
            chart_lines("distance of entries from a fit", "", "Kolmogorov–Smirnov", far, labels=names),
        ]
        return Drawing("Task vectors", panels)


@dataclass(frozen=True, kw_only=True)
class CrossTaskLinearity(OnSamples):
    """CTL per block for pairs of experts, on samples of both tasks.

    Args:
        pairs: `[[a, b], …]`; null: every pair of the run.
        coefficient: λ.
    """

    pairs: Annotated[list[list[str]], MinLen(1)] | None = None
    coefficient: float = 0.3
    samples: Count | None = 256

    def describe_content(self, run: Run) -> dict[str, Any]:
        pairs = choose_pairs(run, self.pairs, default=None)
        names = list(dict.fromkeys(task for pair in pairs for task in pair))
        return {
            "analysis": "ctl",
            "features": "unpadded",
            "pairs": pairs,
            "coefficient": self.coefficient,
            **self.describe_part(run, names),
            **describe_experts(run, names),
        }

    def compute(self, run: Run, resume: Path) -> Data:
        pairs = choose_pairs(run, self.pairs, default=None)
        names = list(dict.fromkeys(task for pair in pairs for task in pair))
        weights = Weights(run.model, run.base_state, read_states(run, names))
        blocks = find_blocks(run.model)
        chosen = self.take_samples(run, names)

        def compute(pair: tuple[str, str]) -> Data:
            both = [chosen[task] for task in pair]
            values = cross_task_linearity(run.model, blocks, weights, pair, both, coefficient=self.coefficient)
            return {"pair": list(pair), "values": list(values.values())}

        results = compute_each(run, resume, pairs, compute, "pairs of experts")
        return {"blocks": list(blocks), "pairs": list(results.values())}

    def draw(self, data: Data) -> Drawing:
        depth = list(range(1, len(data["blocks"]) + 1))
        curves = {" + ".join(entry["pair"]): (depth, entry["values"]) for entry in data["pairs"]}
        panel = chart_lines("by block", "block", "E[1 − cos]", curves)
        return Drawing(f"Cross-task linearity at λ = {self.coefficient:g}", [panel])
