"""The study's figures."""

import statistics
from itertools import product
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from cells import ALONG, CORE, SAME_COST
from results_by_cell import Results, list_arms_along, list_values_along, measure_alignment, show_value

SHOWN = (-9.0, 9.0)
"""Points that the figures show. What falls outside: the largest ρ, and task arithmetic at 0.4."""
DRAWN = ("average", "task_arithmetic", "task_arithmetic at 0.4", "ties", "tsvm", "epimer")
ARMS_SHOWN = (*(arm for arm in CORE if arm != "adamw"), *SAME_COST)

TITLES = {"distance": "learning rate × steps", "base": "steps of pretraining",
          "pretraining": "a second pretraining", "tasks": "tasks merged",
          "likeness": "four tasks", "batch": "batch", "rho": "ρ / the published"}  # fmt: skip
MAIN_VALUE = {"distance": "2e-4 × 300", "base": "20000", "tasks": "8", "likeness": "all 8", "batch": "64",
              "rho": "1"}  # fmt: skip


def draw_axes(results: Results, path: Path) -> None:
    """Gains of two seeds or more along each axis: a column an axis, a row a merger, a line an optimizer."""
    axes = {axis: settings for axis in ALONG if len(settings := [
        setting for setting in list_values_along(results, axis)
        if any(results.list_gains("glyphs", *setting, arm, "experts") for arm in list_arms_along(axis))
    ]) > 1}  # fmt: skip
    shape = (len(DRAWN), len(axes))
    fig, panels = plt.subplots(
        *shape, figsize=(2.7 * shape[1], 1.6 * shape[0]), sharex="col", sharey=True, squeeze=False
    )
    for (column, (axis, settings)), (row, merger) in product(enumerate(axes.items()), enumerate(DRAWN)):
        panel = panels[row][column]
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_ylim(*SHOWN)
        for number, arm in enumerate(ARMS_SHOWN):
            gains = {x: g for x, (own, value) in enumerate(settings) if arm in list_arms_along(axis)
                     and len(g := results.list_gains("glyphs", own, value, arm, merger)) > 1}  # fmt: skip
            ends = {x + 0.1 * (number - 1): g for x, g in gains.items()}
            line = "none" if axis in ("likeness", "pretraining") else "-"
            means = [statistics.mean(g) for g in ends.values()]
            panel.plot(list(ends), means, linestyle=line, color=f"C{number}", linewidth=1)
            for (x, g), mean in zip(ends.items(), means, strict=True):
                error = statistics.stdev(g)
                panel.errorbar(x, mean, error, marker="o", markersize=4, color=f"C{number}", capsize=2)
        names = [show_value(value or MAIN_VALUE[axis]) for _, value in settings]
        panel.set_xticks(range(len(settings)), names, fontsize=8, rotation=40, ha="right")
        panel.tick_params(axis="y", labelsize=8)
        if row == 0:
            panel.set_title(TITLES[axis], fontsize=9)
        if column == 0:
            panel.set_ylabel(merger.replace("_", " "), fontsize=8)
    handles = [
        plt.Line2D([], [], color=f"C{n}", marker="o", markersize=4, label=a) for n, a in enumerate(ARMS_SHOWN)
    ]
    fig.legend(handles=handles, loc="upper center", ncols=len(handles), fontsize=9, frameon=False)
    fig.supylabel("gain over AdamW in points", fontsize=9)
    fig.tight_layout(rect=(0.02, 0, 1, 0.97))
    fig.savefig(path, dpi=90)


def draw_alignment(results: Results, path: Path) -> None:
    """Gains of tuned task arithmetic and TIES over the rise of the cosine."""
    fig, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    groups = {"main, glyphs": [("glyphs", "main")], "main, minilm": [("minilm", "main")]}
    groups |= {axis: [("glyphs", axis), ("minilm", axis)] for axis in ALONG}
    for panel, column in zip(panels, ("task_arithmetic", "ties"), strict=True):
        panel.axhline(0, color="black", linewidth=0.8)
        for number, (name, kinds) in enumerate(groups.items()):
            points = [p[column] for cell, p in measure_alignment(results).items() if cell[:2] in kinds]
            panel.plot(
                *np.array(points).reshape(-1, 2).T,
                "os^vD*PXp"[number],
                color=f"C{number}",
                label=name,
                markersize=5,
            )
        panel.set_ylim(*SHOWN)
        panel.set_title(column.replace("_", " "), fontsize=9)
        panel.set_xlabel("mean cosine between task vectors, minus AdamW's", fontsize=8)
    panels[0].set_ylabel("gain over AdamW in points", fontsize=8)
    panels[1].legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=90)
