"""The task vectors themselves, how their entries are distributed, and what they do to features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, MinLen
from torch import Tensor
from torch.distributions import Laplace, Normal

from mergekit_lab.analysis import Interference, measure_layers
from mergekit_lab.analysis.interference import encode_sums
from mergekit_lab.analysis.plane import Weights, cross_task_linearity, find_blocks
from mergekit_lab.merging import TaskArithmetic
from mergekit_lab.merging.inputs import open_inputs
from mergekit_lab.optim import fit_offset
from mergekit_lab.ranges import Count, Share
from mergekit_lab.reporting.figures import chart_lines, chart_matrix
from mergekit_lab.runs.analyses.contract import (
    Analysis,
    Data,
    Drawing,
    OnSamples,
    choose_pairs,
    compute_each,
    read_states,
    subtract,
)
from mergekit_lab.runs.run import Run

SUM = "+sum"
KINDS = {"laplace": Laplace, "gaussian": Normal}
"""Distributions that are fitted to entries."""
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
        settings = {"rank": self.rank, "values": self.values}
        return self.describe(run, "task_vectors", run.tasks, arithmetic="float32", **settings)

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
        settings = {"pairs": pairs, "coefficient": self.coefficient}
        return self.describe(run, "ctl", names, features="unpadded", **settings)

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


@dataclass(frozen=True)
class EntryDistribution(Analysis):
    """Densities of each task vector's entries and of the sum's, beside a fitted Laplace and a normal one.

    MergOPT, Figures 1 (the sum) and 3 and Table 10 (each). Tensors that no expert moved are left out.

    Args:
        bins: of the histogram.
        share: of the entries, the smallest ones, that the histogram reaches, in (0, 1].
    """

    bins: Annotated[int, Ge(2)] = 101
    share: Share = 0.99

    def describe_content(self, run: Run) -> dict[str, Any]:
        settings = {"bins": self.bins, "share": self.share}
        return self.describe(run, "distribution", run.tasks, arithmetic="float32", **settings)

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
                curves[name] = (x, _evaluate_density(x, kind, fits[kind]))
            title = "sum of all" if label == SUM else label
            title += f", {100 * entry['share_unchanged']:.0f} % unchanged"
            panels.append(chart_lines(title, "change of a weight", "density", curves))
        return Drawing("Entries of task vectors", panels)


def fit_entries(entries: Tensor) -> Data:
    """The distributions fitted to a task vector's entries, and the share of them that did not change."""
    fits = {kind: asdict(fit_offset([entries], kind)) for kind in KINDS}
    return {"fits": fits, "share_unchanged": float((entries == 0).double().mean())}


def _evaluate_density(x: Sequence[float], kind: str, fit: Mapping[str, float]) -> list[float]:
    loc, scale = torch.tensor([fit["loc"], fit["scale"] or 1e-150], dtype=torch.float64)
    return KINDS[kind](loc, scale).log_prob(torch.tensor(x, dtype=torch.float64)).exp().tolist()
