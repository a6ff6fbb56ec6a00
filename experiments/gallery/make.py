"""The gallery of docs/gallery.md: every figure of the three papers from the suite that ships, by one command.

    python experiments/gallery/make.py        (make gallery)

It trains four experts with AdamW, ASAM and MergOPT, runs the analyses, and writes the figures into
docs/images/gallery and the page from `template.md`, with the numbers filled in. What is in the store is found.
Figures that compare optimizers are drawn here from the analyses' numbers; all others are the analyses' own.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from string import Formatter
from typing import Any

from PIL import Image

from mergekit_lab.reporting import read_records
from mergekit_lab.reporting.drawing import save_figure
from mergekit_lab.reporting.encoding import Chart
from mergekit_lab.reporting.figures import chart_lines, chart_plane, spread_levels

ROOT = Path(__file__).parents[2]
TEMPLATE = Path(__file__).with_name("template.md")
SETUP = ["+experiment=quickstart", "joint=false"]
PAIRS = [["digits", "latin"], ["mnist", "style"]]
ON_PAIRS = f"analysis.pairs={json.dumps(PAIRS, separators=(',', ':'))}".replace('"', "")
OPTIMIZERS = {"adamw": "AdamW", "asam": "ASAM (SAFT)", "mergopt": "MergOPT"}
COLORS, WIDTH = 128, 900
BOX = (0.0, 1.0)

Numbers = dict[str, Any]


@dataclass
class Gallery:
    """Runs of `mergekit_lab` under one folder, and the figures and numbers made of them.

    Attributes:
        docs: where `gallery.md` goes, and its figures below.
    """

    work: Path
    docs: Path
    store: Path | None
    tiny: bool
    commands: dict[str, str] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)

    def run(self, folder: str, *overrides: str) -> Path:
        """`python -m mergekit_lab`; returns where it wrote."""
        overrides_of_run = [*SETUP, *overrides]
        self.commands[folder] = " ".join(["python -m mergekit_lab", *map(quote, overrides_of_run)])
        aside = [f"run_dir={self.work / folder}", "progress=false"]
        if self.store is not None:
            aside.append(f"store.root={self.store}")
        if self.tiny:
            aside += ["training.steps=4", "training.warmup_steps=1"]
        print(self.commands[folder], flush=True)
        subprocess.run([sys.executable, "-m", "mergekit_lab", *overrides_of_run, *aside], check=True, cwd=ROOT)
        return self.work / folder

    def analyze(
        self, kind: str, *settings: str, optimizer: str = "adamw", before: str = "", suffix: str = ""
    ) -> Any:
        """An analysis of one optimizer's experts: its numbers.

        Args:
            before: a stage that has to run first.
            suffix: of its folder, where the analysis is run with several settings.
        """
        folder = f"{kind}{suffix}-{optimizer}"
        which = [f"stage=[{before},analyze]"] if before else ["stage=analyze"]
        trained = [] if optimizer == "adamw" else [f"optimizer={optimizer}"]
        small = ["analysis.points=5"] if self.tiny and any("points" in s for s in settings) else []
        run_dir = self.run(folder, *which, *trained, f"analysis={kind}", *settings, *small)
        return json.loads((run_dir / f"analysis/{kind}.json").read_text())

    def keep(self, figure: Path, name: str) -> None:
        """A figure among the page's, in few colors and no wider than a page."""
        image = Image.open(figure, formats=["PNG"]).convert("RGB")
        if image.width > WIDTH:
            image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
        images = self.docs / "images/gallery"
        images.mkdir(parents=True, exist_ok=True)
        few = image.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(images / f"{name}.png", optimize=True)

    def draw(self, name: str, title: str, panels: Sequence[Chart]) -> None:
        self.keep(save_figure(self.work / "figures" / f"{name}.png", title, panels), name)


def quote(override: str) -> str:
    return f"'{override}'" if set("[]{}") & set(override) else override


def _label(pair: Sequence[str]) -> str:
    return " + ".join(pair)


def report(g: Gallery) -> None:
    """The quickstart's own report: what the papers have as tables."""
    folder = g.run("report")
    for name in ("mergers", "shares", "cost", "coefficients"):
        g.keep(folder / f"figures/{name}.png", name)
    for optimizer in list(OPTIMIZERS)[1:]:
        g.run(f"train-{optimizer}", "stage=finetune", f"optimizer={optimizer}")
    records = read_records(folder / "records.jsonl")
    for merger in ("average", "task_arithmetic", "ties", "tsvm", "epimer"):
        shares = [record.normalized or 0.0 for record in records if record.merger == merger]
        g.numbers[merger] = 100 * mean(shares)


def draw_planes(g: Gallery) -> None:
    """SAFT, Figures 1, 2, 4 and 5; MergOPT, Figure 2: one pass over each plane gives ξ and losses."""
    settings = [ON_PAIRS, "analysis.points=9", "analysis.samples=120"]
    for suffix, others in (("", 0.0), ("_all", 0.3)):
        asked = [f"analysis.others={others}", *settings]
        names = list(OPTIMIZERS) if not others else ["adamw", "asam"]
        analyses = {n: g.analyze("landscape", *asked, optimizer=n, suffix=suffix) for n in names}
        alphas = analyses["adamw"]["alphas"]
        drawn: dict[str, dict[str, list[tuple[str, Any]]]] = {"xi": {}, "loss": {}}
        for index, pair in enumerate(PAIRS):
            for name, data in analyses.items():
                measures = data["pairs"][index]["measures"]
                xi = [[50 * value for value in row] for row in measures["xi"]]
                loss = _sum(measures[f"loss/{task}"] for task in pair)
                title = f"{_label(pair)}, {OPTIMIZERS[name]}"
                drawn["xi"].setdefault(name, []).append((title, xi))
                drawn["loss"].setdefault(name, []).append((title, loss))
                key = f"{name}{suffix}_{'_'.join(pair)}"
                g.numbers[f"xi_{key}"] = average_inside(xi, alphas)
                g.numbers[f"loss_{key}"] = average_inside(loss, alphas)
                g.numbers[f"best_{key}"] = min(map(min, loss))
        others_fixed = "two experts" if not others else "other experts at 0.3"
        for what, title in (("xi", "Disentanglement error ξ (%)"), ("loss", "Joint loss of two tasks (nats)")):
            panels = [p for pair in zip(drawn[what]["adamw"], drawn[what]["asam"], strict=True) for p in pair]
            g.draw(f"{what}{suffix}", f"{title}, {others_fixed}", _chart(panels, alphas))
        if not others:
            losses = drawn["loss"]
            panels = [p for pair in zip(losses["adamw"], losses["mergopt"], strict=True) for p in pair]
            g.draw("loss_mergopt", "Joint loss of two tasks (nats), two experts", _chart(panels, alphas))


def _chart(planes: Sequence[tuple[str, Any]], alphas: list[float]) -> list[Chart]:
    """The same colors for the same values in all of them."""
    levels = spread_levels([value for _, values in planes for row in values for value in row])
    return [
        chart_plane(title, values, (alphas, alphas), ("α1", "α2"), box=BOX, levels=levels)
        for title, values in planes
    ]


def _sum(planes: Any) -> list[list[float]]:
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*planes, strict=True)]


def average_inside(values: list[list[float]], alphas: list[float]) -> float:
    """The mean over the box in which coefficients are searched."""
    inside = [i for i, a in enumerate(alphas) if BOX[0] - 1e-9 <= a <= BOX[1] + 1e-9]
    return mean(values[i][j] for i in inside for j in inside)


def draw_linearity(g: Gallery) -> None:
    """SAFT, Figures 3 and C1 (CTL by block), and Definition 2 (the joint loss between experts)."""
    names = ("adamw", "asam")
    analyses = {name: g.analyze("ctl", "analysis.samples=128", optimizer=name) for name in names}
    blocks = list(range(1, len(analyses["adamw"]["blocks"]) + 1))
    panels: list[Chart] = []
    for index, entry in enumerate(analyses["adamw"]["pairs"]):
        curves = {OPTIMIZERS[n]: (blocks, analyses[n]["pairs"][index]["values"]) for n in names}
        panels.append(chart_lines(_label(entry["pair"]), "block", "E[1 − cos]", curves))
    g.draw("ctl", "Cross-task linearity at λ = 0.3, by block", panels)
    for name in names:
        g.numbers[f"ctl_{name}"] = mean(entry["values"][-1] for entry in analyses[name]["pairs"])
    lower = [
        a["values"][-1] > b["values"][-1]
        for a, b in zip(analyses["adamw"]["pairs"], analyses["asam"]["pairs"], strict=True)
    ]
    g.numbers["ctl_lower"], g.numbers["ctl_pairs"] = sum(lower), len(lower)

    ways = {
        name: g.analyze("jtl", "analysis.points=9", "analysis.samples=200", optimizer=name) for name in names
    }
    panels = []
    for index, entry in enumerate(ways["adamw"]["pairs"]):
        deltas = {OPTIMIZERS[n]: (ways[n]["alphas"], ways[n]["pairs"][index]["delta"]) for n in names}
        panels.append(chart_lines(_label(entry["pair"]), "α of the first", "δ (nats)", deltas))
    g.draw("jtl", "Joint-task loss above the straight line between two experts", panels)
    for name in names:
        g.numbers[f"jtl_{name}"] = mean(max(map(abs, entry["delta"])) for entry in ways[name]["pairs"])


def draw_barriers(g: Gallery) -> None:
    """SAFT, Figure C2."""
    settings = ["merger=task_arithmetic", "analysis.points=9", "analysis.part=test", "analysis.samples=300"]
    analyses = {
        name: g.analyze("barrier", *settings, optimizer=name, before="merge") for name in ("adamw", "asam")
    }
    panels: list[Chart] = [
        chart_lines(
            task, "from the merged model (0) to the expert (1)", "test loss (nats)",
            {OPTIMIZERS[n]: (analyses[n]["shares"], analyses[n]["tasks"][task]["loss"]) for n in analyses},
        )
        for task in analyses["adamw"]["tasks"]
    ]  # fmt: skip
    g.draw("barrier", "Test loss from task arithmetic's model to each expert", panels)
    for name, data in analyses.items():
        g.numbers[f"barrier_{name}"] = mean(entry["barrier"] for entry in data["tasks"].values())
        g.numbers[f"gap_{name}"] = mean(e["loss"][0] - e["loss"][-1] for e in data["tasks"].values())


def draw_sharpness(g: Gallery) -> None:
    """SAFT, Figure D1."""
    settings = ["analysis.points=4", "analysis.samples=64", "analysis.iterations=15", "analysis.products=0"]
    curves = {}
    for name in ("adamw", "asam"):
        data = g.analyze("hessian", *settings, "analysis.tolerance=0.05", optimizer=name)
        at = data["shares"]
        means = [mean(p["eigenvalue"] for p in data["points"] if p["at"] == index) for index in at]
        curves[OPTIMIZERS[name]] = (at, means)
        g.numbers[f"eigenvalue_{name}"], g.numbers["eigenvalue_start"] = means[-1], means[0]
        g.numbers[f"converged_{name}"] = sum(p["converged"] for p in data["points"])
        g.numbers["eigenvalues"] = len(data["points"])
    panel = chart_lines("mean over tasks", "γ from θ0 (0) to the expert (1)", "largest eigenvalue", curves)
    g.draw("hessian", "Largest eigenvalue of the loss's Hessian", [panel])


def draw_steps(g: Gallery) -> None:
    """SAFT, Table C1, and what a merge of the same experts reaches."""
    settings = ["analysis.shares=[0.2,1.0]", "analysis.coefficients=[0.4,0.7,1.0]", "analysis.samples=200"]
    analyses = {
        name: g.analyze("steps", "merger=task_arithmetic", *settings, optimizer=name)
        for name in ("adamw", "asam")
    }

    def get_curves(value: Callable[[Any], float]) -> dict[str, Any]:
        return {
            OPTIMIZERS[name]: ([p["steps"] for p in data["points"]], [100 * value(p) for p in data["points"]])
            for name, data in analyses.items()
        }

    panels: list[Chart] = [
        chart_lines("experts", "steps", "mean value (%)", get_curves(lambda p: mean(p["experts"].values()))),
        chart_lines(
            "merged", "steps", "mean value (%)", get_curves(lambda p: p["mergers"]["task_arithmetic"]["value"])
        ),
    ]
    g.draw("steps", "Experts and task arithmetic over steps of fine-tuning, validation", panels)
    for name, data in analyses.items():
        for index, point in enumerate(data["points"]):
            g.numbers[f"expert_{name}_{index}"] = 100 * mean(point["experts"].values())
            g.numbers[f"merged_{name}_{index}"] = 100 * point["mergers"]["task_arithmetic"]["value"]


def draw_distribution(g: Gallery) -> None:
    """MergOPT, Figures 1 and 3 and Table 10."""
    data = g.analyze("distribution")
    draw_own(g, "distribution")
    each = [entry["fits"] for name, entry in data.items() if name != "+sum"]
    for distribution in ("laplace", "gaussian"):
        g.numbers[f"ks_{distribution}"] = mean(fits[distribution]["ks_distance"] for fits in each)
        g.numbers[f"likelihood_{distribution}"] = mean(
            fits[distribution]["mean_log_likelihood"] for fits in each
        )
        g.numbers[f"ks_sum_{distribution}"] = data["+sum"]["fits"][distribution]["ks_distance"]


def draw_epimer(g: Gallery) -> None:
    """EpiMer, Figures 3 and 4, and the coefficients of Tables 7 to 9."""
    data = g.analyze("cloud", "analysis.points=11", "analysis.samples=150")
    g.numbers["explained"] = 100 * sum(data["explained"])
    draw_own(g, "cloud")
    shares = "analysis.fractions=[0.005,0.01,0.05,0.1,0.25,0.5]"
    points = g.analyze("fisher_fraction", "merger=epimer", "analysis.samples=200", shares)["points"]
    reached = [100 * point["normalized"] for point in points]
    g.numbers["fisher_low"], g.numbers["fisher_high"] = min(reached), max(reached)
    g.numbers["fisher_least"], g.numbers["fisher_most"] = reached[0], reached[-1]
    g.numbers["fisher_samples"] = min(points[0]["samples"])
    draw_own(g, "fisher_fraction")
    g.analyze("alpha_sweep", "analysis.points=11", "analysis.samples=200", before="curvature")
    draw_own(g, "alpha_sweep")


def draw_ranks(g: Gallery) -> None:
    """The ranks of EpiMer's Tables 7 to 9, and what its η promises."""
    grid = ["analysis.ranks=[1,4,16,32]", "analysis.coefficients=[0.8,1.2,1.6]", "analysis.samples=200"]
    points = g.analyze("rank_sweep", *grid, before="curvature")["points"]
    for merger in ("tsvm", "epimer"):
        values = [100 * p["normalized"] for p in points if p["merger"] == merger]
        g.numbers[f"rank_{merger}_1"], g.numbers[f"rank_{merger}_all"] = values[0], values[-1]
    draw_own(g, "rank_sweep")
    gain = g.analyze("curvature_gain", before="curvature")
    g.numbers["eta"] = mean(gain["eta"])
    for name in ("curved", "flat"):
        g.numbers[f"gain_{name}"] = mean(gain["losses"][name].values())
    draw_own(g, "curvature_gain")


def draw_inside(g: Gallery) -> None:
    """What the papers do not draw: task vectors beside each other, and the number of experts."""
    overall = g.analyze("task_vectors")["overall"]
    pairs = [row[j] for i, row in enumerate(overall["cosine"]) for j in range(i)]
    g.numbers["cosine_low"], g.numbers["cosine_high"] = min(pairs), max(pairs)
    draw_own(g, "task_vectors")
    g.analyze("expert_count", "merger=tsvm", "analysis.samples=200", "analysis.groups=3")
    draw_own(g, "expert_count")


def draw_own(g: Gallery, name: str) -> None:
    """An analysis's own figure."""
    g.keep(g.work / f"{name}-adamw/analysis/{name}.png", name)


PARTS = {
    part.__name__.removeprefix("draw_"): part
    for part in (
        report,
        draw_planes,
        draw_linearity,
        draw_barriers,
        draw_sharpness,
        draw_steps,
        draw_distribution,
        draw_epimer,
        draw_ranks,
        draw_inside,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / "outputs/gallery", help="where the runs go")
    parser.add_argument("--store", type=Path, help="of experts and numbers; the user's by default")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), help="parts of the page; the others as they were"
    )
    parser.add_argument("--tiny", action="store_true", help="hardly trained, and the page in WORK/docs")
    args = parser.parse_args()
    work = args.work.absolute()
    docs = work / "docs" if args.tiny else ROOT / "docs"
    for name in args.only or PARTS:
        begun = time.monotonic()
        gallery = Gallery(work, docs, args.store, args.tiny)
        PARTS[name](gallery)
        seconds = time.monotonic() - begun
        outcome = {"seconds": seconds, "commands": list(gallery.commands.values()), "numbers": gallery.numbers}
        (work / f"{name}.json").write_text(json.dumps(outcome, indent=1) + "\n")
        print(f"{name}: {seconds / 60:.1f} min", flush=True)
    kept = {name: work / f"{name}.json" for name in PARTS}
    missing = [name for name, file in kept.items() if not file.exists()]
    if missing:
        print(f"left out of the page, for they were not made in {work}: {', '.join(missing)}")
    made_parts = [json.loads(file.read_text()) for file in kept.values() if file.exists()]
    (docs / "gallery.md").write_text(write_page(made_parts, docs))


def write_page(parts: Sequence[Numbers], docs: Path) -> str:
    """The template with every part's numbers in it, without what belongs to parts that were not made."""
    numbers = {name: value for part in parts for name, value in part["numbers"].items()}
    numbers["commands"] = "\n".join(dict.fromkeys(command for part in parts for command in part["commands"]))
    blocks = []
    for block in TEMPLATE.read_text().split("\n\n"):
        figure = re.fullmatch(r"!\[.*\]\((.*)\)", block)
        names = {name for _, name, _, _ in Formatter().parse(block) if name}
        if names <= numbers.keys() and (figure is None or (docs / figure[1]).exists()):
            blocks.append(block.format(**numbers))
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()
