"""Tables, paired tests and the figure of the study. See README.md.

python experiments/flat_minima/analyze.py results.json --figure figure.png
"""

import argparse
import json
import statistics
from pathlib import Path

from scipy.stats import ttest_rel

MERGERS = ("average", "task_arithmetic", "ties", "dare", "tsvm", "epimer")
COLUMNS = ("experts", *MERGERS, *(f"{m}_fixed" for m in MERGERS[1:]))
MAIN = ("adamw", "mergopt 5e-4", "mergopt laplace", "mergopt gaussian", "mergopt b 0.004", "sam", "asam")
"""The papers' own optimizers, which the figure shows."""
Cells = dict[str, dict[int, dict]]


def read(path: Path) -> Cells:
    """Cells by arm and seed, seeds in order."""
    arms: Cells = {}
    for cell in sorted(json.loads(path.read_text())["cells"], key=lambda cell: cell["seed"]):
        arms.setdefault(cell["arm"], {})[cell["seed"]] = cell
    return arms


def average_accuracy(cell: dict, column: str) -> float:
    """Per cent, over tasks."""
    values = cell["accuracy"][column].values()
    return 100 * sum(values) / len(values)


def tabulate(cells: Cells, columns: tuple[str, ...]) -> list[str]:
    """Mean ± standard deviation over seeds; and p of a paired t-test against AdamW on the seeds both have.

    An optimizer of a parametrization is compared with AdamW of the same.
    """
    lines = ["| arm | seeds | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 2)]
    for arm, by_seed in cells.items():
        row = []
        for column in columns:
            values = [average_accuracy(c, column) for c in by_seed.values()]
            text = f"{statistics.mean(values):.1f}"
            if len(values) > 1:
                text += f" ± {statistics.stdev(values):.1f}"
            plain = find_plain(arm, cells)
            common = sorted(set(by_seed) & set(cells[plain]))
            if arm != plain and len(common) > 2:
                pair = [[average_accuracy(cells[a][s], column) for s in common] for a in (arm, plain)]
                text += f" (p {ttest_rel(*pair).pvalue:.2g})"
            row.append(text)
        lines.append(f"| {arm} | {len(by_seed)} | " + " | ".join(row) + " |")
    return lines


def find_plain(arm: str, cells: Cells) -> str:
    """AdamW with the parametrization of an arm."""
    alike = f"adamw, {arm.partition(', ')[2]}"
    return alike if alike in cells else "adamw"


def tabulate_sizes(cells: Cells) -> list[str]:
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


def tabulate_seed(cells: Cells, seed: int = 0) -> list[str]:
    """Every arm at one seed."""
    columns = (*COLUMNS[:7], "task_arithmetic_fixed")
    lines = ["| arm | norm | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 2)]
    for arm, by_seed in cells.items():
        if seed in by_seed:
            cell = by_seed[seed]
            row = [f"{average_accuracy(cell, column):.1f}" for column in columns]
            lines.append(f"| {arm} | {cell['norm']:.2f} | " + " | ".join(row) + " |")
    return lines


PUBLISHED = {"sam rho": ("sam", 0.05), "asam rho": ("asam", 0.5), "mergopt b": ("mergopt 5e-4", 5e-4)}


def list_sensitivity(cells: Cells, optimizer: str, column: str) -> tuple[list[float], list[float]]:
    """A hyper-parameter over its published value, and seed 0's accuracy above AdamW's."""
    own, published = PUBLISHED[optimizer]
    arm_by_scale = {1.0: own} | {float(a.split()[-1]) / published: a for a in cells if a.startswith(optimizer)}
    base = average_accuracy(cells["adamw"][0], column)
    scales = sorted(x for x, arm in arm_by_scale.items() if 0 in cells[arm])
    return scales, [average_accuracy(cells[arm_by_scale[x]][0], column) - base for x in scales]


def draw_figure(cells: Cells, path: Path) -> None:
    """What each merger gives an optimizer's experts above AdamW's, task arithmetic's curves, sensitivity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = {arm: cells[arm] for arm in MAIN}
    names = [c for c in COLUMNS if c not in ("dare_fixed", "ties_fixed", "epimer_fixed")]
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(15.5, 4.4), width_ratios=(3, 2, 2))
    colors = {arm: f"C{index}" for index, arm in enumerate(drawn)}
    others = [a for a in drawn if a != "adamw"]
    for index, arm in enumerate(others):
        common = sorted(set(drawn[arm]) & set(drawn["adamw"]))
        gains = [
            [average_accuracy(drawn[arm][s], n) - average_accuracy(drawn["adamw"][s], n) for s in common]
            for n in names
        ]
        where = [i + (index - len(others) / 2) * 0.13 for i in range(len(names))]
        means = [statistics.mean(g) for g in gains]
        spread = [statistics.stdev(g) for g in gains]
        left.errorbar(where, means, spread, fmt="o", markersize=4, capsize=2, label=arm, color=colors[arm])
    left.axhline(0, color="C0", linewidth=1)
    left.set_xticks(range(len(names)), [n.replace("_", "\n") for n in names], fontsize=8)
    left.set_ylabel("accuracy above AdamW's, points")
    for arm, by_seed in drawn.items():
        curves = [c["curve"]["task_arithmetic"] for c in by_seed.values()]
        alphas = [alpha for alpha, _ in curves[0]]
        values = [100 * statistics.mean(c[i][1] for c in curves) for i in range(len(alphas))]
        middle.plot(alphas, values, color=colors[arm], label=arm)
    middle.axvline(0.4, color="gray", linewidth=0.8, linestyle=":")
    middle.set_xlim(0, 1.2)
    middle.set_xlabel("coefficient of task arithmetic")
    middle.set_ylabel("normalized validation accuracy, %")
    middle.legend(fontsize=8)
    for optimizer, (arm, _) in PUBLISHED.items():
        for column, line in (("average", "--"), ("task_arithmetic", "-")):
            label = f"{optimizer}, {column.replace('_', ' ')}"
            points = list_sensitivity(cells, optimizer, column)
            right.plot(*points, line, marker="o", markersize=4, color=colors[arm], label=label)
    right.axhline(0, color="C0", linewidth=1)
    right.set_xscale("log")
    right.set_ylim(-9, 4)
    right.set_xlabel("times the published value, seed 0")
    right.set_ylabel("accuracy above AdamW's, points")
    right.legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    cells = read(options.results)
    several = {arm: by_seed for arm, by_seed in cells.items() if len(by_seed) > 2 and arm not in MAIN}
    whole = {arm: several[arm] for arm in several if ", " not in arm}
    groups = [{arm: cells[arm] for arm in MAIN}, whole, {arm: several[arm] for arm in several if ", " in arm}]
    for group in groups:
        for part in (COLUMNS[:7], ("experts", *COLUMNS[7:])):
            print("\n".join(tabulate(group | {"adamw": cells["adamw"]}, part)), end="\n\n")
        print("\n".join(tabulate_sizes(group)), end="\n\n")
    print("\n".join(tabulate_seed(cells)))
    if options.figure:
        draw_figure(cells, options.figure)


if __name__ == "__main__":
    main()
