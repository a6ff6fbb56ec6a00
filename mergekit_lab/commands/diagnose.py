"""Which experts will interfere, and where, from checkpoints that are there already."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mergekit_lab.analysis import Advice, Interference, Layer, advise, measure_layers
from mergekit_lab.analysis.interference import encode_sums
from mergekit_lab.commands.prepare import prepare
from mergekit_lab.commands.sources import read_sources, shorten_path
from mergekit_lab.merging import TaskArithmetic, resolve_device
from mergekit_lab.merging.inputs import open_inputs

log = logging.getLogger(__name__)
FILE = "diagnosis.json"
_SHOWN = 12


@dataclass(frozen=True)
class Diagnose:
    """The configuration of the command.

    Args:
        base: a folder, a file or a hub id.
        experts: a list of the same and of PEFT adapters' folders, a mapping from name to one, or `@list.txt`.
        fishers: in the experts' order or by name, or `@list.txt`; null: no curvature.
        include, exclude: name patterns of tensors.
        embeddings: intersect, pad or base, where vocabularies differ.
        rank: leading singular vectors of a matrix that are compared.
        device: where the arithmetic happens.
        seed: of the sketches that singular vectors are found from.
        progress: show a bar.
    """

    command: Literal["diagnose"]
    base: str | None
    experts: Any
    fishers: Any
    include: list[str] | None
    exclude: list[str]
    embeddings: Literal["intersect", "pad", "base"] | None
    rank: Annotated[int, Ge(1)]
    device: str | int
    seed: int
    progress: bool
    run_dir: str

    def run(self, folder: Path) -> None:
        """Measure, write `diagnosis.json` into `folder`, and print the tables.

        Raises:
            InputError: inputs that are missing or do not belong together.
        """
        begun = time.monotonic()
        measured, notes = self._measure()
        advice = advise(measured)
        folder.mkdir(parents=True, exist_ok=True)
        commands = self._list_next_commands() if (measured.total.norms > 0).sum() > 1 else []
        diagnosis = as_json(measured, advice, notes) | {"commands": commands}
        (folder / FILE).write_text(json.dumps(diagnosis, indent=1, allow_nan=False) + "\n")
        for note in notes:
            log.info("%s", note)
        show(measured, advice, Console())
        for command in commands:
            print(f"   {command}")
        seconds = time.monotonic() - begun
        log.info("diagnosed %d experts in %.0f s: %s", len(measured.experts), seconds, folder / FILE)

    def _list_next_commands(self) -> list[str]:
        """What to type to compare mergers on these experts, and to merge them by the advised one."""
        experts = read_sources(self.experts, "experts")
        names = list(experts) if isinstance(experts, dict) else [shorten_path(path) for path in experts]
        listed = ",".join(experts.values() if isinstance(experts, dict) else experts)
        texts = ",".join(f"{name}.csv" for name in names)
        inputs = f"base={shlex.quote(str(self.base))} {shlex.quote(f'experts=[{listed}]')}"
        return [
            f"python -m mergekit_lab +experiment=compare_mergers {inputs} {shlex.quote(f'texts=[{texts}]')}",
            f"python -m mergekit_lab +experiment=merge_checkpoints {inputs} out=merged merger=tsvm",
        ]

    def _measure(self) -> tuple[Interference, Sequence[str]]:
        statistics = {} if self.fishers is None else {"fisher": read_sources(self.fishers, "fishers")}
        prepared = prepare(
            self.base or "",
            read_sources(self.experts, "experts"),
            TaskArithmetic(),
            statistics=statistics,
            include=self.include,
            exclude=self.exclude,
            device=self.device,
            embeddings=self.embeddings,
            allow_config_mismatch=["*"],  # nothing is merged: notes will do
        )
        inputs = open_inputs(
            prepared.base,
            prepared.experts,
            prepared.method,
            include=prepared.include,
            exclude=prepared.left_out,
        )
        fishers = prepared.side.get("fisher")
        measured = Interference(tuple(inputs.experts), fishers is not None)
        device = resolve_device(prepared.device[0])
        layers = measure_layers(inputs, fishers=fishers, rank=self.rank, device=device, seed=self.seed)
        for layer, traces in track(
            layers, "diagnosing", total=len(inputs.merged), disable=not self.progress, transient=True
        ):
            measured.add(layer, traces)
        return measured, prepared.notes


def as_json(measured: Interference, advice: Sequence[Advice], notes: Sequence[str]) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "experts": list(measured.experts),
        "base_norm": measured.base_norm,
        "overall": encode_sums(measured.total),
        "fisher_traces": measured.fisher_traces.tolist() if measured.has_fishers else None,
        "bound": measured.bound.to_json() if measured.has_fishers else None,
        "pairs": [asdict(pair) for pair in list_pairs(measured)],
        "advice": [asdict(each) for each in advice],
        "notes": list(notes),
        "layers": [layer.to_json() for layer in measured.layers],
    }


@dataclass(frozen=True)
class Pair:
    """Two experts, and where their changes conflict.

    Attributes:
        experts: their names.
        cosine, sign_conflict, canceling: over the whole model.
        overlap: of leading singular subspaces, over chance; the mean over matrices. Null without matrices.
        harm: predicted rise of the first's loss by the second's task vector, and the other way round; null
            without Fishers.
        where: tensors by their share of what cancels (of the harm, with Fishers), the largest first.
    """

    experts: tuple[str, str]
    cosine: float
    sign_conflict: float
    canceling: float
    overlap: float | None
    harm: tuple[float, float] | None
    where: list[tuple[str, float]]


def list_pairs(measured: Interference) -> list[Pair]:
    """Every pair: most harm first with Fishers, else most canceling."""
    total = measured.total
    pairs = []
    for i, first in enumerate(measured.experts):
        for j, second in enumerate(measured.experts[:i]):
            overlaps = [float(x.spectra.overlap[i, j]) / x.spectra.chance for x in measured.layers if x.spectra]
            pairs.append(
                Pair(
                    (second, first),
                    float(total.cosine[i, j]),
                    float(total.sign_conflict[i, j]),
                    float(total.canceling[i, j]),
                    sum(overlaps) / len(overlaps) if overlaps else None,
                    (float(total.harm[j, i]), float(total.harm[i, j])) if measured.has_fishers else None,
                    _rank_layers(measured, i, j),
                )
            )
    return sorted(pairs, key=lambda p: -sum(p.harm) if p.harm else -p.canceling)


def _rank_layers(measured: Interference, i: int, j: int) -> list[tuple[str, float]]:
    def measure_amount(layer: Layer) -> float:
        sums = layer.sums
        return float(sums.harm[i, j] + sums.harm[j, i] if measured.has_fishers else sums.lost[i, j])

    amounts = {layer.name: measure_amount(layer) for layer in measured.layers}
    whole = sum(amounts.values())
    largest = sorted(amounts.items(), key=lambda item: -item[1])[:5]
    return [(name, value / whole if whole else 0.0) for name, value in largest]


def show(measured: Interference, advice: Sequence[Advice], console: Console) -> None:
    """Print experts, pairs, layers and advice as tables."""
    console.print(_tabulate_experts(measured))
    if len(measured.experts) > 1:
        console.print(_tabulate_pairs(measured))
        console.print(_tabulate_layers(measured))
    if measured.has_fishers and any(layer.bound for layer in measured.layers):
        console.print(_tabulate_bounds(measured))
    for number, each in enumerate(advice, start=1):
        console.print(f"{number}. {each.text}", style="bold", highlight=False)
        console.print(f"   here: {each.because}", highlight=False)
        console.print(f"   evidence: {each.evidence}", highlight=False)


def _make_table(title: str, first: str, others: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right")
    return table


def _tabulate_experts(measured: Interference) -> Table:
    table = _make_table("Experts", "expert", ("norm", "of base", "stable rank", "energy in top k"))
    matrices = [layer.spectra for layer in measured.layers if layer.spectra]
    for t, name in enumerate(measured.experts):
        norm = float(measured.total.norms[t])
        cells = [f"{norm:.3g}", f"{100 * norm / max(measured.base_norm, 1e-300):.2f} %"]
        if matrices:
            cells.append(f"{float(torch.stack([s.stable_rank[t] for s in matrices]).median()):.1f}")
            cells.append(f"{100 * float(torch.stack([s.energy[t] for s in matrices]).median()):.0f} %")
        table.add_row(name, *cells)
    return table


def _tabulate_pairs(measured: Interference) -> Table:
    columns = ["cosine", "sign conflict", "canceling", "subspaces / chance"]
    columns += ["harm →", "harm ←"] if measured.has_fishers else []
    order = "harm" if measured.has_fishers else "canceling"
    title = f"Pairs, most {order} first (sign conflict and canceling: 50 % is unrelated)"
    table = _make_table(title, "pair", columns)
    for pair in list_pairs(measured)[:_SHOWN]:
        cells = [f"{pair.cosine:.3f}", f"{100 * pair.sign_conflict:.1f} %", f"{100 * pair.canceling:.1f} %"]
        cells.append("–" if pair.overlap is None else f"{pair.overlap:.2f}")
        cells += [f"{value:.3g}" for value in pair.harm or ()]
        table.add_row(" – ".join(pair.experts), *cells)
    return table


def _tabulate_layers(measured: Interference) -> Table:
    """Tensors by what cancels in them over all pairs."""
    table = _make_table("Where most cancels", "tensor", ("share", "mean cosine", "subspaces / chance"))
    upper = torch.triu(torch.ones(len(measured.experts), len(measured.experts), dtype=torch.bool), 1)
    whole = float(measured.total.lost[upper].sum())
    order = sorted(measured.layers, key=lambda layer: -float(layer.sums.lost[upper].sum()))
    for layer in order[:_SHOWN]:
        share = float(layer.sums.lost[upper].sum()) / whole if whole else 0.0
        overlap = "–"
        if layer.spectra:
            overlap = f"{float(layer.spectra.overlap[upper].mean()) / layer.spectra.chance:.2f}"
        table.add_row(
            layer.name, f"{100 * share:.1f} %", f"{float(layer.sums.cosine[upper].mean()):.3f}", overlap
        )
    return table


def _tabulate_bounds(measured: Interference) -> Table:
    """Matrices by the curvature that a merge of their leading directions leaves out, the whole model last."""
    title = "Curvature that a merge of rank k leaves out (EpiMer, Theorem 2)"
    table = _make_table(title, "matrix", ("k", "conflict V", "residual R", "½(√V + √R)²", "lost"))
    bounded = [(layer, layer.bound) for layer in measured.layers if layer.bound and layer.spectra]
    rows = [(layer.name, str(layer.spectra.rank), bound) for layer, bound in bounded if layer.spectra]
    rows.sort(key=lambda row: -row[2].residual)
    for name, rank, bound in [*rows[:_SHOWN], ("all matrices", "", measured.bound)]:
        cells = [f"{value:.3g}" for value in (bound.conflict, bound.residual, bound.bound)]
        table.add_row(name, rank, *cells, f"{100 * bound.lost:.0f} %")
    return table
