"""Tables, paired tests and the figure of the study. See README.md.

python experiments/flat_minima/analyse.py results.json --figure figure.png
"""

import argparse
import json
import statistics
from pathlib import Path

from scipy.stats import ttest_rel

MERGERS = ("average", "task_arithmetic", "ties", "dare", "tsvm", "epimer")
COLUMNS = ("experts", *MERGERS, *(f"{m}_fixed" for m in MERGERS[1:]))
Cells = dict[str, dict[int, dict]]


def read(path: Path) -> Cells:
    """Cells by arm and seed."""
    found: Cells = {}
    for cell in json.loads(path.read_text())["cells"]:
        found.setdefault(cell["arm"], {})[cell["seed"]] = cell
    return found


def mean_accuracy(cell: dict, column: str) -> float:
    """Per cent, over tasks."""
    values = cell["accuracy"][column].values()
    return 100 * sum(values) / len(values)


def table(cells: Cells, columns: tuple[str, ...]) -> list[str]:
    """Mean ± standard deviation over seeds; and p of a paired t-test against AdamW on the seeds both have."""
    lines = ["| arm | seeds | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 2)]
    for arm, by_seed in cells.items():
        row = []
        for column in columns:
            values = [mean_accuracy(c, column) for c in by_seed.values()]
            text = f"{statistics.mean(values):.1f}"
            if len(values) > 1:
                text += f" ± {statistics.stdev(values):.1f}"
            common = sorted(set(by_seed) & set(cells["adamw"]))
            if arm != "adamw" and len(common) > 2:
                pair = [[mean_accuracy(cells[a][s], column) for s in common] for a in (arm, "adamw")]
                text += f" (p {ttest_rel(*pair).pvalue:.2g})"
            row.append(text)
        lines.append(f"| {arm} | {len(by_seed)} | " + " | ".join(row) + " |")
    return lines


def sizes(cells: Cells) -> list[str]:
    """How long task vectors are, and which coefficients were chosen."""
    searched = MERGERS[1:]
    lines = ["| arm | norm | mean abs | fitted b | " + " | ".join(searched) + " |", "|" + "---|" * 9]
    for arm, by_seed in cells.items():
        many = list(by_seed.values())
        norm, size = (statistics.mean(c[k] for c in many) for k in ("norm", "mean_abs"))
        fits = [c["fitted_b"] for c in many if c["fitted_b"]]
        chosen = [", ".join(f"{c['coefficient'][m]:g}" for c in many) for m in searched]
        fitted = f"{statistics.mean(fits):.2e}" if fits else "–"
        lines.append(f"| {arm} | {norm:.2f} | {size:.2e} | {fitted} | " + " | ".join(chosen) + " |")
    return lines


def figure(cells: Cells, path: Path) -> None:
    """What each merger gives an optimizer's experts above AdamW's, and task arithmetic's curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = {a: c for a, c in cells.items() if len(set(c) & set(cells["adamw"])) > 1}
    names = [c for c in COLUMNS if c not in ("dare_fixed", "ties_fixed", "epimer_fixed")]
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2))
    others = [a for a in drawn if a != "adamw"]
    for place, arm in enumerate(others):
        common = sorted(set(drawn[arm]) & set(drawn["adamw"]))
        gains = [
            [mean_accuracy(drawn[arm][s], n) - mean_accuracy(drawn["adamw"][s], n) for s in common]
            for n in names
        ]
        where = [i + (place - len(others) / 2) * 0.13 for i in range(len(names))]
        means = [statistics.mean(g) for g in gains]
        spread = [statistics.stdev(g) for g in gains]
        left.errorbar(where, means, spread, fmt="o", markersize=4, capsize=2, label=arm, color=f"C{place + 1}")
    left.axhline(0, color="C0", linewidth=1)
    left.set_xticks(range(len(names)), [n.replace("_", "\n") for n in names], fontsize=8)
    left.set_ylabel("accuracy above AdamW's, points")
    for place, (arm, by_seed) in enumerate(drawn.items()):
        curves = [c["curve"]["task_arithmetic"] for c in by_seed.values()]
        alphas = [alpha for alpha, _ in curves[0]]
        values = [100 * statistics.mean(c[i][1] for c in curves) for i in range(len(alphas))]
        right.plot(alphas, values, color=f"C{place}", label=arm)
    right.axvline(0.4, color="grey", linewidth=0.8, linestyle=":")
    right.set_xlim(0, 1.2)
    right.set_xlabel("coefficient of task arithmetic")
    right.set_ylabel("normalised validation accuracy, %")
    right.legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    cells = read(options.results)
    for part in (COLUMNS[:7], ("experts", *COLUMNS[7:])):
        print("\n".join(table(cells, part)), end="\n\n")
    print("\n".join(sizes(cells)))
    if options.figure:
        figure(cells, options.figure)


if __name__ == "__main__":
    main()
