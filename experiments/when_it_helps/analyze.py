"""Tables, tests and the figure of the study, from its lines. See README.md.

python experiments/when_it_helps/analyze.py results/*.jsonl --figure figure.png > results/tables.md

Legend: a gain is accuracy above that of AdamW's cell with the same world, axis, value and seed, in points; an
optimizer of a parametrization is compared with AdamW of the same.
"""

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cells import (
    ALONG,
    ARMS,
    AT_FIXED,
    CORE,
    COUNTS,
    EPIMERS,
    FIXED,
    GROUPS,
    MERGERS,
    ON_AXES,
    RHOS,
    SAMPLES,
    SEEDS,
)
from scipy.stats import spearmanr, t, ttest_1samp
from study import read

Line = dict[str, Any]
FIXED_COLUMNS = tuple(f"{name} at {FIXED:g}" for name in AT_FIXED)
TUNED_COLUMNS = ("experts", *MERGERS)
MEASURES = ("norm", "length", "cosine", "eigenvalue", "trace", "ctl", "xi 0.4", "xi 1")
"""What may predict a gain; all but the cosine as the logarithm of the ratio to AdamW's. The length is that
of the average's step."""
SHOWN = (-9.0, 9.0)
"""Points that the figure shows. What falls below: the largest ρ, and task arithmetic at 0.4."""
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
        """Those in which AdamW was measured: without it there is no gain."""
        return list(dict.fromkeys(k.world for k in self if k[1:4] == ("main", "", "adamw")))


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
    return float(ttest_1samp(gains, 0.0).pvalue)


def block_tests(results: Results, world: str, arms: Sequence[str], column: str) -> dict[str, float]:
    """p of each arm against its AdamW's by a two-way analysis of variance: seeds are blocks.

    All arms together say how much a cell varies, on the premise that they vary alike: many more degrees of
    freedom than the two of a paired t-test.
    """
    seeds = sorted(set.intersection(*(set(results.seeds(world, "main", "", arm)) for arm in arms)))
    if len(seeds) < 2:
        return {}
    cells = {a: [accuracy(results[Key(world, "main", "", a, s)], column) for s in seeds] for a in arms}
    table = np.array(list(cells.values()), dtype=float)
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    freedom = (len(arms) - 1) * (len(seeds) - 1)
    error = math.sqrt(2 * (rest**2).sum() / freedom / len(seeds))
    found = {}
    for arm, own in zip(arms, table, strict=True):
        reference = results.reference(Key(world, "main", "", arm, seeds[0])).arm
        found[arm] = float(2 * t.sf(abs(own.mean() - np.mean(cells[reference])) / error, freedom))
    return found


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
    compared = [arm for arm in arms if not arm.startswith("adamw")]
    gains = {(arm, c): results.gains(world, "main", "", arm, c) for arm in compared for c in columns}
    paired = holm({name: t_test(values) for name, values in gains.items()})
    blocks = {c: block_tests(results, world, arms, c) for c in columns}
    pooled = holm({(arm, c): blocks[c].get(arm, math.nan) for arm, c in gains})
    text += (
        f"Gain in points. There are {len(gains)} tests, and what is under 0.05 by Holm's correction for all of "
        "them is bold by paired t-tests over seeds, and has a star by an analysis of variance over arms and "
        "seeds.\n\n"
    )

    def show(name: tuple[str, str]) -> str:
        said = spread(gains[name], "+.1f")
        said = f"**{said}**" if paired[name] < 0.05 else said
        return said + (" \\*" if pooled[name] < 0.05 else "")

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
    if name == "length":
        count = len(line["tasks"])
        return float(line["norm"] * math.sqrt((1 + (count - 1) * line["cosine"]) / count))
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
    """Where all seeds gain at one value and all lose at another, and how often chance alone would do that."""
    found, chance = [], 0.0
    for arm, column in product(arms_along(axis), (*ON_AXES, *FIXED_COLUMNS)):
        gains = [(value or "main", g) for own, value in places
                 if len(g := results.gains("glyphs", own, value, arm, column)) == len(SEEDS)]  # fmt: skip
        for (low, before), (high, after) in combinations(gains, 2):
            chance += 2 * 0.5 ** (len(before) + len(after))
            if (min(before) > 0 and max(after) < 0) or (max(before) < 0 and min(after) > 0):
                p = t_test([b - a for a, b in zip(before, after, strict=True)])
                ends = f"{spread(before, '+.1f')} at {low}, {spread(after, '+.1f')} at {high}"
                found.append(f"- {arm}, {column}: {ends}; paired p of the difference {p:.2g}")
    if not chance:
        return ""
    return "\n".join([
        f"Where all three seeds gain at one value and lose at another: {len(found)}; chance alone would make "
        f"{chance:.1f}.", "", *found, "",
    ])  # fmt: skip


def task_tables(results: Results) -> str:
    """Which tasks gain: of all eight, and in groups of four."""
    tasks = list(results[Key("glyphs", "main", "", "adamw", 0)]["tasks"])
    rows = []
    for (axis, value), merger, arm in product(
        (("main", ""), *(("likeness", group) for group in GROUPS)), ("task_arithmetic", "tsvm"), RHOS
    ):
        keys = [Key("glyphs", axis, value, arm, seed) for seed in results.seeds("glyphs", axis, value, arm)]
        pairs = [
            [results[k]["mergers"][merger]["accuracy"] for k in (key, results.reference(key))] for key in keys
        ]
        gains = [[100 * (own[t] - other[t]) for own, other in pairs if t in own] for t in tasks]
        rows.append([value or "all 8", merger, arm, *(spread(each, "+.1f") for each in gains)])
    return "## glyphs: gains by task\n\n" + markdown(("tasks", "merger", "arm", *tasks), rows) + "\n"


def predictions(results: Results, world: str) -> str:
    """Rank correlations of what was measured with the gain, over arms that are not AdamW's."""
    columns = (*ON_AXES, *FIXED_COLUMNS)
    arms = list(dict.fromkeys(k[:4] for k in results if k.world == world and k.axis in ("main", "rho")))
    groups = (arms, [arm for arm in arms if arm[1] == "main"])
    points = {(n, c): [[p for arm in group if (p := point_of(results, arm, n, c))] for group in groups]
              for n, c in product(MEASURES, columns)}  # fmt: skip
    counts = list(map(len, points["norm", "average"]))
    if counts[1] < 5:
        return ""
    rows = [
        [n, *(" / ".join(f"{spearmanr(side).statistic:+.2f}" for side in points[n, c]) for c in columns)]
        for n in MEASURES
    ]
    return (
        f"## {world}: what predicts a gain?\n\nSpearman's ρ between a measure, as it differs from AdamW's, and "
        f"the gain: over {counts[0]} points (an arm, or a value of ρ, in the mean of its seeds) / over the "
        f"{counts[1]} main arms alone. No p: points share AdamW's chance, and those along ρ are doses of one "
        "thing.\n\n" + markdown(("measure", *columns), rows) + "\n" + longer_steps(results, world)
    )


def longer_steps(results: Results, world: str) -> str:
    """What the average would gain if AdamW's own step were as long as the arm's."""
    rows = []
    for arm in ARMS:
        ratios, expected, gains = [], [], []
        for key in (Key(world, "main", "", arm, seed) for seed in results.seeds(world, "main", "", arm)):
            if (reference := results.reference(key)) == key or reference not in results:
                continue
            own, other = results[key], results[reference]
            ratios.append((measure_of(own, "length") or 0.0) / (measure_of(other, "length") or math.nan))
            count = len(other["tasks"])
            curve = np.array(other["mergers"]["task_arithmetic"]["curve"])
            low, high = np.interp([1 / count, ratios[-1] / count], *curve.T)
            expected.append((high - low) * (accuracy(other, "experts") or math.nan))
            gains.append(results.gain(key, "average") or 0.0)
        if gains:
            rows.append([arm, spread(ratios, ".2f"), spread(expected, "+.1f"), spread(gains, "+.1f")])
    return (
        "The average's step beside AdamW's; what a step of that length along AdamW's own average would gain, "
        "read off the validation curve of AdamW's task arithmetic; and what the average gained on test.\n\n"
        + markdown(("arm", "length / AdamW's", "from length alone", "average's gain"), rows)
        + "\n"
    )


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
    text = "## EpiMer\n\nEpiMer − TSV-M in points, tuned; one value a seed, p of a paired t-test.\n\n"
    ahead = {
        k: e for k, line in results.items() if k.world == "glyphs" and (e := epimer_lead(line)) is not None
    }
    groups = {
        "adamw, but for distances": [k for k in ahead if k.axis != "distance" and k.arm == "adamw"],
        **{f"core arms, {n} tasks": [k for k in ahead if k[1:3] == ("tasks", str(n))] for n in COUNTS},
        "core arms, 8 tasks": [k for k in ahead if k.axis == "main" and k.arm in CORE],
        "all arms, 8 tasks": [k for k in ahead if k.axis == "main"],
        **{f"{arm}, 8 tasks": [k for k in ahead if k[1:4] == ("main", "", arm)] for arm in ARMS},
    }
    rows = []
    for name, keys in groups.items():
        seeds = sorted({k.seed for k in keys})
        means = [statistics.mean(ahead[k] for k in keys if k.seed == seed) for seed in seeds]
        above = sum(ahead[k] > 0 for k in keys)
        by_seed = ", ".join(f"{m:+.2f}" for m in means)
        rows.append([name, f"{above} of {len(keys)}", by_seed, spread(means, "+.2f"), f"{t_test(means):.2g}"])
    text += markdown(("experts", "EpiMer is ahead in", "by seed", "mean", "p"), rows) + "\n"
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

    axes = {axis: places for axis in ALONG if len(places := [
        place for place in values_along(results, axis)
        if any(results.gains("glyphs", *place, arm, "experts") for arm in arms_along(axis))
    ]) > 1}  # fmt: skip
    shape = (len(DRAWN), len(axes))
    fig, panels = plt.subplots(
        *shape, figsize=(2.7 * shape[1], 1.6 * shape[0]), sharex="col", sharey=True, squeeze=False
    )
    for (column, (axis, places)), (row, merger) in product(enumerate(axes.items()), enumerate(DRAWN)):
        panel = panels[row][column]
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_ylim(*SHOWN)
        for number, arm in enumerate(arms_along(axis)):
            gains = {x: g for x, (own, value) in enumerate(places)
                     if (g := results.gains("glyphs", own, value, arm, merger))}  # fmt: skip
            ends = {x + 0.1 * (number - 1): g for x, g in gains.items()}
            line = "none" if axis == "likeness" else "-"
            means = [statistics.mean(g) for g in ends.values()]
            panel.plot(list(ends), means, linestyle=line, color=f"C{number}", linewidth=1)
            for (x, g), mean in zip(ends.items(), means, strict=True):
                error = statistics.stdev(g) if len(g) > 1 else None
                face = "white" if error is None else f"C{number}"
                panel.errorbar(
                    x,
                    mean,
                    error,
                    marker="o",
                    markersize=4,
                    color=f"C{number}",
                    markerfacecolor=face,
                    capsize=2,
                )
        names = [value or MAIN_VALUE[axis] for _, value in places]
        panel.set_xticks(range(len(places)), names, fontsize=8, rotation=40, ha="right")
        panel.tick_params(axis="y", labelsize=8)
        if row == 0:
            panel.set_title(TITLES[axis], fontsize=9)
        if column == 0:
            panel.set_ylabel(merger.replace("_", " "), fontsize=8)
    arms = [arm for arm in CORE if arm != "adamw"]
    handles = [plt.Line2D([], [], color=f"C{n}", marker="o", markersize=4, label=a) for n, a in enumerate(arms)]
    handles.append(
        plt.Line2D([], [], color="gray", marker="o", markerfacecolor="white", ls="", label="one seed")
    )
    fig.legend(handles=handles, loc="upper center", ncols=len(handles), fontsize=9, frameon=False)
    fig.supylabel("gain over AdamW in points", fontsize=9)
    fig.tight_layout(rect=(0, 0, 1, 0.97))
    fig.savefig(path, dpi=90)


TITLES = {"distance": "learning rate x steps", "base": "steps of pretraining", "tasks": "tasks merged",
          "likeness": "four tasks", "batch": "batch", "rho": "ρ / the published"}  # fmt: skip
MAIN_VALUE = {"distance": "2e-4 x 300", "base": "20000", "tasks": "8", "likeness": "all 8", "batch": "64",
              "rho": "1"}  # fmt: skip


def arms_along(axis: str) -> list[str]:
    """Those that have cells along an axis."""
    return list(RHOS) if axis == "rho" else [arm for arm in CORE if arm != "adamw"]


def report(results: Results) -> str:
    """All tables."""
    axes = [axis for axis in ALONG if any(key.axis == axis for key in results)]
    return "\n".join([
        *(main_tables(results, world) for world in results.worlds()),
        *(axis_tables(results, axis) for axis in axes),
        task_tables(results),
        *(predictions(results, world) for world in results.worlds()),
        epimer_tables(results),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files that study.py wrote")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    everything = [line for path in options.results for line in read(path)]
    results = Results.of(everything)
    left_out = sum(key.world not in results.worlds() for key in results)
    print(f"{len(results)} lines; {left_out} are of worlds without AdamW, and left out.\n")
    for line in everything:
        if "error" in line and (key := Key(*(line[name] for name in Key._fields))) not in results:
            print(f"- failed: {'/'.join(map(str, key))}: {line['error']}")
    print(report(results))
    if options.figure:
        figure(results, options.figure)


if __name__ == "__main__":
    main()
