"""Tables, tests and the figure of the study, from its lines. See README.md.

python experiments/when_it_helps/analyze.py results.jsonl --figure figure.png > tables.md

Legend: a gain is accuracy above that of AdamW's cell with the same world, axis, value and seed, in points; an
optimizer of a parametrization is compared with AdamW of the same.
"""

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from cells import ALONG, ARMS, AT_FIXED, CORE, EPIMERS, FIXED, MERGERS, ON_AXES, RHOS, SAMPLES
from scipy.stats import spearmanr, ttest_rel
from study import read

Line = dict[str, Any]
FIXED_COLUMNS = tuple(f"{name} at {FIXED:g}" for name in AT_FIXED)
TUNED_COLUMNS = ("experts", *MERGERS)
MEASURES = ("norm", "mean_abs", "cosine", "eigenvalue", "trace", "ctl", "xi 0.4", "xi 1")
"""What may predict a gain; all but the cosine as the logarithm of the ratio to AdamW's."""
DRAWN = ("average", "task_arithmetic", "task_arithmetic at 0.4", "ties", "tsvm", "epimer")


class Key(NamedTuple):
    """Of a line."""

    world: str
    axis: str
    value: str
    arm: str
    seed: int


class Results(dict[Key, Line]):
    """Lines by what they are of."""

    @classmethod
    def of(cls, lines: Iterable[Line]) -> "Results":
        """The latest good line of each cell."""
        return cls({Key(*(line[name] for name in Key._fields)): line for line in lines if "error" not in line})

    def reference(self, key: Key) -> Key:
        """AdamW's cell that a cell is compared with; of values that AdamW does not have, the main one."""
        alike = f"adamw, {key.arm.partition(', ')[2]}"
        arm = alike if alike in ARMS else "adamw"
        return key._replace(arm=arm, axis="main", value="") if key.axis == "rho" else key._replace(arm=arm)

    def gain(self, key: Key, column: str) -> float | None:
        """Of one cell; None where it or AdamW's does not have it."""
        own, other = accuracy(self.get(key), column), accuracy(self.get(self.reference(key)), column)
        return None if own is None or other is None else own - other

    def gains(self, world: str, axis: str, value: str, arm: str, column: str) -> list[float]:
        """Of every seed that both have, in the order of seeds."""
        keys = [Key(world, axis, value, arm, seed) for seed in self.seeds(world, axis, value, arm)]
        return [gain for key in keys if (gain := self.gain(key, column)) is not None]

    def seeds(self, world: str, axis: str, value: str, arm: str) -> list[int]:
        return sorted(k.seed for k in self if k[:4] == (world, axis, value, arm))

    def worlds(self) -> list[str]:
        return list(dict.fromkeys(key.world for key in self))


def accuracy(line: Line | None, column: str) -> float | None:
    """Per cent, mean over tasks; None where a line does not have it."""
    if line is None:
        return None
    if column in ("experts", "zero_shot"):
        values: dict[str, float] | None = {task: line[column][task] for task in line["tasks"]}
    else:
        name, _, fixed = column.partition(" at ")
        merger = line["mergers"].get(name, {})
        values = merger.get("fixed" if fixed else "accuracy")
    return None if values is None else 100 * sum(values.values()) / len(values)


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Mean ± standard deviation."""
    if not values:
        return "–"
    text = f"{statistics.mean(values):{form}}"
    return text + (f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else "")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def t_test(gains: Sequence[float]) -> float:
    """p of a paired t-test; not a number for fewer than three pairs, or where they do not vary."""
    if len(gains) < 3 or len(set(gains)) < 2:
        return math.nan
    return float(ttest_rel(gains, [0.0] * len(gains)).pvalue)


def holm(values: dict[Any, float]) -> dict[Any, float]:
    """p-values corrected for their number by Holm's method."""
    known = sorted((p, name) for name, p in values.items() if not math.isnan(p))
    corrected, highest = dict.fromkeys(values, math.nan), 0.0
    for place, (p, name) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - place)))
        corrected[name] = highest
    return corrected


def main_tables(results: Results, world: str) -> str:
    """Accuracies, gains with tests, and the coefficients of the main cells."""
    arms = [arm for arm in ARMS if results.seeds(world, "main", "", arm)]
    columns = (*TUNED_COLUMNS, *FIXED_COLUMNS)
    cells = {arm: [results[Key(world, "main", "", arm, s)] for s in results.seeds(world, "main", "", arm)]
             for arm in arms}  # fmt: skip
    zero = [accuracy(line, "zero_shot") or 0.0 for lines in cells.values() for line in lines[:1]]
    text = f"## {world}: main arms\n\nTest accuracy in per cent. Zero-shot is {zero[0]:.1f}.\n\n"
    rows = []
    for arm, lines in cells.items():
        values = [[accuracy(line, c) for line in lines] for c in columns]
        rows.append([arm, str(len(lines)), *(spread([v for v in each if v is not None]) for each in values)])
    text += markdown(("arm", "seeds", *columns), rows) + "\n"
    gains = {(arm, c): results.gains(world, "main", "", arm, c) for arm in arms for c in columns
             if not arm.startswith("adamw")}  # fmt: skip
    tests = {name: t_test(values) for name, values in gains.items()}
    corrected = holm(tests)
    count = sum(not math.isnan(p) for p in tests.values())
    text += (
        f"Gain in points, and p of a paired t-test over seeds. There are {count} tests: bold is what stays "
        "under 0.05 by Holm's correction for all of them.\n\n"
    )

    def show(name: tuple[str, str]) -> str:
        said = spread(gains[name], "+.1f")
        said += "" if math.isnan(tests[name]) else f" (p {tests[name]:.2g})"
        return f"**{said}**" if corrected[name] < 0.05 else said

    compared = [arm for arm in arms if not arm.startswith("adamw")]
    text += markdown(("arm", *columns), ([arm, *(show((arm, c)) for c in columns)] for arm in compared)) + "\n"
    sizes = []
    for arm, lines in cells.items():
        chosen = [", ".join(f"{line['mergers'][m]['coefficient']:g}" for line in lines) for m in MERGERS[1:]]
        scales = [line["scale"] for line in lines if isinstance(line["scale"], float)]
        measured = [
            spread([v for line in lines if (v := measure_of(line, m)) is not None], ".3g") for m in MEASURES
        ]
        sizes.append([arm, spread(scales, ".2g"), *measured, *chosen])
    text += "Task vectors and what was measured at the experts; coefficients by seed.\n\n"
    return text + markdown(("arm", "b", *MEASURES, *MERGERS[1:]), sizes) + "\n"


def measure_of(line: Line, name: str) -> float | None:
    """A measure of a line, if it has it."""
    value = line.get(name, line.get("measures", {}).get(name))
    return float(value) if value is not None else None


def values_along(results: Results, axis: str) -> list[tuple[str, str]]:
    """Axis and value of the lines along an axis in its order, the main cell among them."""
    order = [("main", "") if value is None else (axis, value) for value in ALONG[axis]]
    return [place for place in order if any(k.axis == place[0] and k.value == place[1] for k in results)]


def axis_tables(results: Results, axis: str) -> str:
    """Gains along an axis, and where their signs change."""
    places = values_along(results, axis)
    arms = arms_along(axis)
    columns = ("experts", *ON_AXES, *FIXED_COLUMNS)
    rows = []
    for (own, value), arm in ((p, a) for p in places for a in arms):
        seeds = results.seeds("glyphs", own, value, arm)
        if seeds:
            lines = [results[Key("glyphs", own, value, arm, seed)] for seed in seeds]
            ratio = statistics.mean(line["norm"] / line["base_norm"] for line in lines)
            cosine = statistics.mean(line["cosine"] for line in lines)
            shown = [spread(results.gains("glyphs", own, value, arm, c), "+.1f") for c in columns]
            rows.append([value or "main", arm, str(len(seeds)), f"{ratio:.4f}", f"{cosine:.3f}", *shown])
    references = [
        [value or "main", "adamw", *(spread([v for s in results.seeds("glyphs", own, value, "adamw")
          if (v := accuracy(results[Key("glyphs", own, value, "adamw", s)], c)) is not None]) for c in columns)]
        for own, value in places if axis != "rho"
    ]  # fmt: skip
    text = f"## glyphs, along {axis}\n\n"
    if references:
        text += "AdamW's accuracy in per cent:\n\n" + markdown((axis, "arm", *columns), references) + "\n"
    text += "Gain in points:\n\n"
    head = (axis, "arm", "seeds", "norm / base's", "cosine", *columns)
    return text + markdown(head, rows) + "\n" + sign_changes(results, axis, places) + "\n"


def sign_changes(results: Results, axis: str, places: Sequence[tuple[str, str]]) -> str:
    """Where all seeds gain at one value and all lose at the next."""
    found = []
    for arm in arms_along(axis):
        for column in (*ON_AXES, *FIXED_COLUMNS):
            gains = [(value or "main", g) for own, value in places
                     if len(g := results.gains("glyphs", own, value, arm, column)) > 1]  # fmt: skip
            for (low, before), (high, after) in pairwise(gains):
                if (min(before) > 0 and max(after) < 0) or (max(before) < 0 and min(after) > 0):
                    ends = f"{spread(before, '+.1f')} at {low}, {spread(after, '+.1f')} at {high}"
                    found.append(f"- {arm}, {column}: {ends}")
    title = f"Where every seed has one sign at a value of {axis}, and every seed the other at the next:"
    return "\n".join([title, "", *(found or ["- nowhere"]), ""])


def predictions(results: Results) -> str:
    """Rank correlations of what was measured with the gain, over arms that are not AdamW's."""
    text = (
        "## What predicts a gain?\n\nSpearman's ρ (p) between a measure, as it differs from AdamW's, and the "
        "gain. A point is an arm, or a value of ρ, in the mean of its seeds, which share AdamW's chance.\n\n"
    )
    columns = (*ON_AXES, *FIXED_COLUMNS)
    for world in results.worlds():
        arms = dict.fromkeys(k[1:4] for k in results if k.world == world and k.axis in ("main", "rho"))
        rows = []
        for name in MEASURES:
            row = [name]
            for column in columns:
                points = [p for arm in arms if (p := point_of(results, (world, *arm), name, column))]
                if len(points) > 4 and all(len(set(side)) > 1 for side in zip(*points, strict=True)):
                    found = spearmanr(*zip(*points, strict=True))
                    row.append(f"{found.statistic:+.2f} ({found.pvalue:.1g}; {len(points)})")
                else:
                    row.append("–")
            rows.append(row)
        text += f"{world}; the number of points stands last:\n\n" + markdown(("measure", *columns), rows) + "\n"
    return text


def point_of(
    results: Results, arm: tuple[str, str, str, str], name: str, column: str
) -> tuple[float, float] | None:
    """A measure's difference to AdamW's and the gain, means over seeds; None where there are none."""
    changes, gains = [], []
    for key in (Key(*arm, seed) for seed in results.seeds(*arm)):
        reference = results.reference(key)
        if reference == key or reference not in results:
            continue
        own, other = (measure_of(results[k], name) for k in (key, reference))
        if own is None or other is None or (name != "cosine" and min(own, other) <= 0):
            continue
        gain = results.gain(key, column)
        if gain is not None:
            changes.append(own - other if name == "cosine" else math.log(own / other))
            gains.append(gain)
    return (statistics.mean(changes), statistics.mean(gains)) if gains else None


def epimer_tables(results: Results) -> str:
    """EpiMer against TSV-M, its settings, and its theorem."""
    text = "## EpiMer\n\nEpiMer − TSV-M in points, AdamW's experts, tuned; p of a paired t-test.\n\n"
    rows = []
    groups = dict.fromkeys((key.world, key.axis) for key in results)
    everything: list[float] = []
    tests = {}
    for world, axis in groups:
        keys = [k for k in results if k[:2] == (world, axis) and k.arm == "adamw"]
        differences = [d for key in keys if (d := epimer_lead(results[key])) is not None]
        everything += differences
        tests[world, axis] = t_test(differences)
        rows.append([world, axis, str(len(differences)), spread(differences, "+.2f")])
    for row, corrected in zip(rows, holm(tests).values(), strict=True):
        row += [f"{tests[row[0], row[1]]:.2g}", f"{corrected:.2g}"]
    rows.append(["all", "", str(len(everything)), spread(everything, "+.2f"), f"{t_test(everything):.2g}", ""])
    text += markdown(("world", "axis", "cells", "difference", "p", "Holm"), rows) + "\n"
    text += "Other settings against the default, main cells of AdamW, points:\n\n"
    labels = (*EPIMERS, *(f"epimer samples {n}" for n in SAMPLES))
    rows = []
    for label in labels:
        row = [label.removeprefix("epimer ")]
        for world in results.worlds():
            lines = [results[k] for k in results if k[:4] == (world, "main", "", "adamw")]
            pairs = [(accuracy(line, label), accuracy(line, "epimer")) for line in lines]
            row.append(spread([a - b for a, b in pairs if a is not None and b is not None], "+.2f"))
        rows.append(row)
    text += markdown(("setting", *results.worlds()), rows) + "\n"
    text += (
        "Theorem 2: the bound on the mean rise of the experts' losses (nats), with Fishers as they are, and "
        "the rise that the theorem's merge has on the Fishers' samples.\n\n"
    )
    bounds = [
        [k.world, str(k.seed), *(f"{line['epimer'][n]:.3g}" for n in ("conflict", "residual", "bound", "rise")),
         " to ".join(f"{f(line['epimer']['fisher_traces'].values()):.3g}" for f in (min, max))]
        for k, line in results.items() if "epimer" in line
    ]  # fmt: skip
    return text + markdown(("world", "seed", "V", "R", "bound", "rise", "Fisher traces"), bounds) + "\n"


def epimer_lead(line: Line) -> float | None:
    ends = [accuracy(line, name) for name in ("epimer", "tsvm")]
    return None if None in ends else ends[0] - ends[1]  # type: ignore[operator]


def figure(results: Results, path: Path) -> None:
    """Gains along each axis: a column an axis, a row a merger, a line an optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = [axis for axis in ALONG if len(values_along(results, axis)) > 1]
    shape = (len(DRAWN), max(1, len(axes)))
    size = (2.6 * shape[1], 1.9 * shape[0])
    fig, panels = plt.subplots(*shape, figsize=size, sharex="col", sharey="row", squeeze=False)
    arms = [arm for arm in CORE if arm != "adamw"]
    for column, axis in enumerate(axes):
        places = values_along(results, axis)
        for row, merger in enumerate(DRAWN):
            panel = panels[row][column]
            panel.axhline(0, color="black", linewidth=0.8)
            for number, arm in enumerate(arms):
                if arm not in arms_along(axis):
                    continue
                points = [(x, g) for x, (own, value) in enumerate(places)
                          if (g := results.gains("glyphs", own, value, arm, merger))]  # fmt: skip
                if not points:
                    continue
                x = [p + 0.08 * (number - 1.5) for p, _ in points]
                y = [statistics.mean(g) for _, g in points]
                error = [statistics.stdev(g) if len(g) > 1 else 0.0 for _, g in points]
                style = {"marker": "o", "markersize": 3, "linewidth": 1, "capsize": 2}
                panel.errorbar(x, y, error, color=f"C{number}", label=arm, **style)
            if row == 0:
                panel.set_title(axis, fontsize=9)
            if column == 0:
                panel.set_ylabel(f"{merger.replace('_', ' ')}\npoints", fontsize=8)
            names = [value or MAIN_VALUE[axis] for _, value in places]
            panel.set_xticks(range(len(places)), names, fontsize=7, rotation=45, ha="right")
            panel.tick_params(axis="y", labelsize=7)
    handles, labels = panels[0][0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="upper center", ncols=len(arms), fontsize=9, frameon=False)
    fig.suptitle(" ", fontsize=9)
    fig.tight_layout()
    fig.savefig(path, dpi=110)


MAIN_VALUE = {"distance": "2e-4 x 300", "base": "20000", "tasks": "8", "likeness": "all 8", "batch": "64",
              "rho": "published"}  # fmt: skip


def arms_along(axis: str) -> list[str]:
    """Those that have cells along an axis."""
    return list(RHOS) if axis == "rho" else [arm for arm in CORE if arm != "adamw"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files that study.py wrote")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    everything = [line for path in options.results for line in read(path)]
    results = Results.of(everything)
    failed = {Key(*(line[name] for name in Key._fields)): line["error"]
              for line in everything if "error" in line}  # fmt: skip
    print(f"{len(results)} lines.\n")
    for key, error in failed.items():
        if key not in results:
            print(f"- failed: {'/'.join(map(str, key))}: {error}")
    for world in results.worlds():
        print(main_tables(results, world))
    for axis in ALONG:
        if any(key.axis == axis for key in results):
            print(axis_tables(results, axis))
    print(predictions(results))
    print(epimer_tables(results))
    if options.figure:
        figure(results, options.figure)


if __name__ == "__main__":
    main()
