"""Tables and the figure of the study, from its results.

    python experiments/mergopt_smollm2/figures.py

Averages are over the six tasks that are answered by the likeliest choice; `stories`, which is decoded, stands
in columns of its own (the first run did not decode it rightly). Values are percent on test, mean over seeds.
"""

import json
from math import exp
from pathlib import Path
from statistics import mean, stdev

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use("Agg")
HERE = Path(__file__).parent
CHOICE = ("r8", "newsgroups", "tweets", "spam", "wordnet", "reviews")
MERGERS = ("average", "task_arithmetic", "ties", "dare", "tsvm", "epimer")


def average_six(values: dict[str, float]) -> float:
    """Percent, mean over the six tasks."""
    return 100 * mean(values[t] for t in CHOICE if t in values)


def select_seeds(arms: dict, arm: str) -> dict[int, dict]:
    """What was found of an optimizer, by seed."""
    runs = {int(n.rpartition("-")[2]): a for n, a in arms.items() if n.rpartition("-")[0] == arm}
    return {s: a for s, a in sorted(runs.items()) if "experts" in a}


def format_cell(values: list[float]) -> str:
    if not values:
        return "–"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def tabulate_decoded(runs: dict[int, dict]) -> list[str]:
    """Percent of `stories`, of its expert and two merges."""
    own = [100 * a["experts"]["stories"] for a in runs.values() if "stories" in a["experts"]]
    merged = [
        [100 * a["mergers"][m]["test"]["stories"] for a in runs.values() if "stories" in get_test(a, m)]
        for m in ("average", "tsvm")
    ]
    return [format_cell(own), *map(format_cell, merged)]


def get_test(arm: dict, merger: str) -> dict[str, float]:
    return arm.get("mergers", {}).get(merger, {}).get("test", {})


def find_best(entry: dict) -> float:
    """The coefficient that is best on validation over the six tasks."""
    return float(max(entry["curve"], key=lambda a: average_six(entry["curve"][a])))


def main() -> None:
    arms = json.loads((HERE / "results.json").read_text())["arms"]
    names = list(dict.fromkeys(n.rpartition("-")[0] for n in arms))
    print(f"zero-shot: {average_six(arms['zero_shot-0']['test']):.1f}")
    print("| optimizer | seeds | experts | " + " | ".join(MERGERS) + " | stories: experts | average | TSV-M |")
    print("|---|---:|" + "---:|" * (len(MERGERS) + 4))
    for arm in names:
        runs = select_seeds(arms, arm)
        if not runs:
            continue
        whole = [average_six(a["experts"]) for a in runs.values() if set(CHOICE) <= set(a["experts"])]
        cells = [
            format_cell(
                [average_six(a["mergers"][m]["test"]) for a in runs.values() if m in a.get("mergers", {})]
            )
            for m in MERGERS
        ]
        cells += tabulate_decoded(runs)
        print(f"| {arm} | {len(runs)} | {format_cell(whole)} | " + " | ".join(cells) + " |")
    print("\nbest coefficients on validation, task arithmetic and TSV-M:")
    for arm in names:
        of_arm = [a["mergers"] for a in select_seeds(arms, arm).values() if "tsvm" in a.get("mergers", {})]
        print(arm, [find_best(m["task_arithmetic"]) for m in of_arm], [find_best(m["tsvm"]) for m in of_arm])
    print("\nTSV-M on validation beyond the grid:")
    for name, arm in arms.items():
        entry = arm.get("mergers", {}).get("tsvm", {})
        if "beyond" in entry:
            curve = entry["curve"] | entry["beyond"]
            print(name, {a: round(average_six(v), 1) for a, v in curve.items()})
    print("\ngroups:")
    for name, arm in arms.items():
        for group, entry in arm.get("groups", {}).items():
            print(name, group.count("+") + 1, group, f"{average_six(entry['test']):.1f}")
    print("\nmixed:")
    for name, arm in arms.items():
        for mixture, entry in arm.get("mixed", {}).items():
            print(
                name,
                mixture,
                f"{average_six(entry['test']):.1f}",
                {a: round(average_six(v), 1) for a, v in entry["fixed"].items()},
            )
    vectors = {n: a["vectors"] for n, a in arms.items() if "vectors" in a}
    print("\ntask vectors: mean absolute value, cosine, K-S and log-likelihood of both fits")
    for name, v in vectors.items():
        fits = {
            k: [mean(f[x] for f in v[k].values()) for x in ("ks_distance", "mean_log_likelihood")]
            for k in ("laplace", "gaussian")
        }
        size, alike = mean(v["mean_absolute"].values()), mean(v["cosine"].values())
        print(f"{name} {size:.2e} {alike:.3f} {fits}")
    draw(arms)


def draw(arms: dict) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8))
    for arm in ("adamw", "mergopt", "mergopt_b5e-3", "asam", "sgd"):
        runs = [a["mergers"] for a in select_seeds(arms, arm).values() if "tsvm" in a.get("mergers", {})]
        if not runs:
            continue
        for panel, merger in ((left, "task_arithmetic"), (middle, "tsvm")):
            alphas = list(runs[0][merger]["curve"])
            values = [mean(average_six(f[merger]["curve"][a]) for f in runs) for a in alphas]
            label = f"{arm} ({len(runs)} seed{'s' if len(runs) > 1 else ''})"
            panel.plot([float(a) for a in alphas], values, marker="o", ms=3, label=label)
    for panel, title in ((left, "task arithmetic"), (middle, "TSV-M")):
        panel.set(title=title, xlabel="α", ylabel="accuracy on validation (%)")
        panel.axhline(average_six(arms["zero_shot-0"]["test"]), color="gray", lw=0.8, ls=":")
    left.legend(fontsize=7)
    vectors = arms["adamw-0"]["vectors"]
    edge, counts = vectors["histogram"]["edge"], vectors["histogram"]["counts"]["newsgroups"]
    width = 2 * edge / len(counts)
    x = [-edge + width * (i + 0.5) for i in range(len(counts))]
    fit = vectors["laplace"]["newsgroups"]
    right.bar(
        x, [c / fit["entries"] / width for c in counts], width=width, label="entries", color="lightsteelblue"
    )
    density = [exp(-abs(v - fit["loc"]) / fit["scale"]) / (2 * fit["scale"]) for v in x]
    right.plot(x, density, color="firebrick", lw=1, label=f"Laplace, b = {fit['scale']:.1e}")
    right.set(title="task vector of newsgroups, AdamW", xlabel="change of a weight", ylabel="density",
              xlim=(-6e-4, 6e-4), xticks=(-5e-4, 0, 5e-4))  # fmt: skip
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(HERE / "figure.png", dpi=110)


if __name__ == "__main__":
    main()
