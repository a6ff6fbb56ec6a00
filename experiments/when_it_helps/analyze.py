"""Tables, tests and the figure of the study, from its lines. See README.md.

cd experiments/when_it_helps && python analyze.py results/*.jsonl --figure figure.png > results/tables.md

Legend: a gain is accuracy above that of AdamW's cell with the same world, axis, value and seed, in points; an
optimizer of a parametrization is compared with AdamW of the same.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

from cells import (
    ALONG,
    ARMS,
    CORE,
    COUNTS,
    EPIMERS,
    FRESH_SEEDS,
    GROUPS,
    MERGERS,
    ON_AXES,
    RHOS,
    SAMPLES,
    SEEDS,
)
from predicting import MEASURES, tabulate_predictions, tabulate_predictions_along, write_alignment_table
from repeating import write_repeat_tables
from results_by_cell import (
    FIXED_COLUMNS,
    Key,
    Line,
    Results,
    list_arms_along,
    list_values_along,
    measure_epimer_lead,
    read_accuracy,
    read_measure,
    show_value,
)
from scipy.stats import t
from significance import mark_along, mark_main, run_t_test
from study import read
from writing import show_spread, write_table

TUNED_COLUMNS = ("experts", *MERGERS)


def write_main_tables(results: Results, world: str) -> str:
    """Accuracies, gains with tests, and the coefficients of the main cells."""
    arms = [arm for arm in ARMS if results.list_seeds(world, "main", "", arm)]
    columns = (*TUNED_COLUMNS, *FIXED_COLUMNS)
    cells = {arm: [results[Key(world, "main", "", arm, s)] for s in results.list_seeds(world, "main", "", arm)]
             for arm in arms}  # fmt: skip
    zero = [read_accuracy(line, "zero_shot") or 0.0 for lines in cells.values() for line in lines[:1]]
    text = f"## {world}: main arms\n\nTest accuracy in per cent. Zero-shot is {zero[0]:.1f}.\n\n"
    rows = []
    for arm, lines in cells.items():
        values = [[read_accuracy(line, c) for line in lines] for c in columns]
        rows.append(
            [arm, str(len(lines)), *(show_spread([v for v in each if v is not None]) for each in values)]
        )
    text += write_table(("arm", "seeds", *columns), rows) + "\n"
    compared = [arm for arm in arms if not arm.startswith("adamw")]
    gains = {(arm, c): results.list_gains(world, "main", "", arm, c) for arm in compared for c in columns}
    marks = mark_main(results, world)
    last = 0.05 / (len(gains) - len(marks.starred))
    limits = [f"{t.isf(last / 2, freedom) * error:.2f}" for error, freedom in marks.spreads]
    text += (
        f"Gain in points. There are {len(gains)} tests, and what is under 0.05 by Holm's correction for all of "
        "them is bold by paired t-tests over seeds, and has a star by an analysis of variance over arms and "
        f"seeds. {sum(p < 0.05 for p in marks.paired.values())} are bold, {len(marks.starred)} have a star.\n\n"
    )

    def show(name: tuple[str, str]) -> str:
        text = show_spread(gains[name], "+.1f")
        text = f"**{text}**" if marks.paired[name] < 0.05 else text
        return text + (" \\*" if name in marks.starred else "")

    text += (
        write_table(("arm", *columns), ([arm, *(show((arm, c)) for c in columns)] for arm in compared)) + "\n"
    )
    text += "The smallest difference that one more star would take:\n\n"
    text += write_table(columns, [limits]) + "\n"
    sizes = []
    for arm, lines in cells.items():
        chosen = [", ".join(f"{line['mergers'][m]['coefficient']:g}" for line in lines) for m in MERGERS[1:]]
        scales = [line["scale"] for line in lines if isinstance(line["scale"], float)]
        measured = [
            show_spread([v for line in lines if (v := read_measure(line, m)) is not None], ".3g")
            for m in MEASURES
        ]
        sizes.append([arm, show_spread(scales, ".2g"), *measured, *chosen])
    text += "Task vectors and what was measured at the experts; coefficients by seed.\n\n"
    return text + write_table(("arm", "b", *MEASURES, *MERGERS[1:]), sizes) + "\n"


def write_axis_tables(results: Results, axis: str) -> str:
    """Gains along an axis, and where their signs change."""
    points = list_values_along(results, axis)
    arms = list_arms_along(axis)
    columns = ("experts", *ON_AXES, *FIXED_COLUMNS)
    rows: list[list[str]] = []
    stars = mark_along(results, "glyphs", axis, columns)
    coefficients: list[list[str]] = []
    for (own, value), arm in ((p, a) for p in points for a in arms):
        seeds = results.list_seeds("glyphs", own, value, arm)
        if seeds:
            lines = [results[Key("glyphs", own, value, arm, seed)] for seed in seeds]
            ratio = statistics.mean(line["norm"] / line["base_norm"] for line in lines)
            cosine = statistics.mean(line["cosine"] for line in lines)
            means = [show_spread(results.list_gains("glyphs", own, value, arm, c), "+.1f")
                     + " \\*" * ((("glyphs", own, value, arm), c) in stars) for c in columns]  # fmt: skip
            rows.append([show_value(value), arm, str(len(seeds)), f"{ratio:.4f}", f"{cosine:.3f}", *means])
    for (own, value), arm in ((p, a) for p in points for a in ("adamw", *arms)):
        lines = [
            results[Key("glyphs", own, value, arm, s)] for s in results.list_seeds("glyphs", own, value, arm)
        ]
        chosen = [", ".join(f"{line['mergers'][m]['coefficient']:g}" for line in lines) for m in ON_AXES[1:]]
        coefficients.extend([[show_value(value), arm, *chosen]] if lines else [])
    references = [
        [show_value(value), *(show_spread([v for s in results.list_seeds("glyphs", own, value, "adamw")
          if (v := read_accuracy(results[Key("glyphs", own, value, "adamw", s)], c)) is not None])
          for c in ("zero_shot", *columns))]
        for own, value in points if axis != "rho"
    ]  # fmt: skip
    text = f"## glyphs, along {axis}\n\n"
    at = "at all values" if axis == "rho" else "at one value"
    if references:
        text += (
            "AdamW's accuracy in per cent:\n\n" + write_table((axis, "zero-shot", *columns), references) + "\n"
        )
    text += (
        f"Gain in points. A star: p < .05 by an analysis of variance over the arms {at} and seeds, by Holm's "
        "correction for all tests along this axis; the main arms have their own.\n\n"
    )
    head = (axis, "arm", "seeds", "norm / base's", "cosine", *columns)
    text += write_table(head, rows) + "\n" + list_sign_changes(results, axis, points) + "\n"
    return text + "Coefficients by seed:\n\n" + write_table((axis, "arm", *ON_AXES[1:]), coefficients) + "\n"


def list_sign_changes(results: Results, axis: str, points: Sequence[tuple[str, str]]) -> str:
    """Where all seeds gain at one value and all lose at another, and how often chance alone would do that."""
    changes, chance = [], 0.0
    for arm, column in product(list_arms_along(axis), (*ON_AXES, *FIXED_COLUMNS)):
        gains = [(show_value(value), g) for own, value in points
                 if len(g := results.list_gains("glyphs", own, value, arm, column)) == len(SEEDS)]  # fmt: skip
        for (low, before), (high, after) in combinations(gains, 2):
            chance += 2 * 0.5 ** (len(before) + len(after))
            if (min(before) > 0 and max(after) < 0) or (max(before) < 0 and min(after) > 0):
                p = run_t_test([b - a for a, b in zip(before, after, strict=True)])
                ends = f"{show_spread(before, '+.1f')} at {low}, {show_spread(after, '+.1f')} at {high}"
                changes.append(f"- {arm}, {column}: {ends}; paired p of the difference {p:.2g}")
    if not chance:
        return ""
    return "\n".join([
        f"Where all three seeds gain at one value and lose at another: {len(changes)}; chance alone would make "
        f"{chance:.1f}.", "", *changes, "",
    ])  # fmt: skip


def write_task_tables(results: Results, world: str) -> str:
    """Which tasks gain: of all eight, and on glyphs in groups of four."""
    tasks = list(results[Key(world, "main", "", "adamw", 0)]["tasks"])
    groups = (("main", ""), *(("likeness", group) for group in GROUPS if world == "glyphs"))
    rows = []
    for (axis, value), merger, arm in product(groups, ("task_arithmetic", "ties", "tsvm"), RHOS):
        keys = [Key(world, axis, value, arm, seed) for seed in results.list_seeds(world, axis, value, arm)]
        pairs = [
            [results[k]["mergers"][merger]["accuracy"] for k in (key, results.find_reference(key))]
            for key in keys
        ]
        gains = [[100 * (own[t] - other[t]) for own, other in pairs if t in own] for t in tasks]
        means = sorted(statistics.mean(each) for each in gains if each)
        rest = f"{statistics.mean(means[:-1]):+.1f}"
        rows.append([value or "all 8", merger, arm, *(show_spread(each, "+.1f") for each in gains), rest])
    head = ("tasks", "merger", "arm", *tasks, "all but the largest gain")
    return f"## {world}: gains by task\n\n" + write_table(head, rows) + "\n"


def write_rho_table(results: Results) -> str:
    """Gains over ρ as a share of the base's norm, which is what two models have in common."""
    cells = [cell for cell in results.list_cells() if cell[3] in RHOS and cell[1] in ("main", "rho")]
    columns = ("experts", *ON_AXES)
    stars = set().union(*(mark_along(results, world, "rho", columns) for world in results.list_worlds()))
    rows = []
    for world, axis, value, arm in cells:
        lines = [results[Key(world, axis, value, arm, s)] for s in results.list_seeds(world, axis, value, arm)]
        share = statistics.mean(line["rho"] / line["base_norm"] for line in lines)
        moved = statistics.mean(line["norm"] / line["base_norm"] for line in lines)
        cell = (world, axis, value, arm)
        gains = [
            show_spread(results.list_gains(*cell, c), "+.1f") + " \\*" * ((cell, c) in stars) for c in columns
        ]
        of_vector = f"{share / moved:.2g}"
        rows.append((arm, share, [arm, f"{share:.1e}", of_vector, world, value or "1", f"{moved:.4f}", *gains]))
    rows.sort(key=lambda row: row[:2])
    head = (
        "arm", "ρ / base's norm", "ρ / task vector's", "world", "times ρ", "task vector's / base's", *columns
    )  # fmt: skip
    return (
        "## ρ relative to the base's norm\n\nGain in points. Stars as along ρ above, for each world's tests; "
        "the main arms (1) have their own.\n\n" + write_table(head, (r[2] for r in rows)) + "\n"
    )


def write_language_model_table() -> str:
    """The cosine's rise and the gains in experiments/mergopt_smollm2, means over seeds."""
    arms = json.loads((Path(__file__).parents[1] / "mergopt_smollm2/results.json").read_text())["arms"]
    mergers = ("average", "task_arithmetic", "ties", "tsvm")

    def read_points(cell: dict[str, Any], merger: str) -> float:
        accuracies = {t: a for t, a in cell["mergers"][merger]["test"].items() if t != "stories"}
        return 100 * statistics.mean(accuracies.values())

    rows = []
    for arm in ("sam", "asam", "sgd"):
        pairs = [(arms[f"{arm}-{seed}"], arms[f"adamw-{seed}"]) for seed in SEEDS]
        means = [[statistics.mean(a["vectors"]["cosine"].values()) for a in pair] for pair in pairs]
        rise = [own - other for own, other in means]
        gains = [[read_points(a, m) - read_points(b, m) for a, b in pairs] for m in mergers]
        rows.append([arm, show_spread(rise, "+.3f"), *(", ".join(f"{g:+.1f}" for g in each) for each in gains)])
    return (
        "## SmolLM2: the cosine between task vectors\n\nOf experiments/mergopt_smollm2: the rise over AdamW's, "
        "and gains by seed in points.\n\n" + write_table(("arm", "cosine", *mergers), rows) + "\n"
    )


def write_seconds_table(results: Results) -> str:
    """What cells took, several at once on a card."""
    kinds: dict[str, list[float]] = {}
    for key, line in results.items():
        if "seconds" in line:
            phase = f"{key.world}, {key.axis}" + ", with EpiMer's settings" * ("epimer" in line)
            kinds.setdefault(phase, []).append(sum(line["seconds"].values()))
    rows = [
        [phase, str(len(s)), *(f"{f(s):.0f}" for f in (min, statistics.median, max))]
        for phase, s in kinds.items()
    ]
    return "## Seconds of a cell\n\n" + write_table(("cells", "number", "least", "median", "most"), rows) + "\n"


def write_epimer_tables(results: Results) -> str:
    """EpiMer against TSV-M, its settings, and its theorem."""
    text = "## EpiMer\n\nEpiMer − TSV-M in points, tuned; one value a seed, p of a paired t-test.\n\n"
    leads = {k: e for k, line in results.items() if (e := measure_epimer_lead(line)) is not None}
    ahead = {k: e for k, e in leads.items() if k.world == "glyphs"}
    others = [world for world in results.list_worlds() if world != "glyphs"]
    groups = {
        "adamw": [k for k in ahead if k.arm == "adamw"],
        **{f"core arms, {n} tasks": [k for k in ahead if k[1:3] == ("tasks", str(n))] for n in COUNTS},
        "core arms, 8 tasks": [k for k in ahead if k.axis == "main" and k.arm in CORE],
        "all arms, 8 tasks": [k for k in ahead if k.axis == "main"],
        **{f"{arm}, 8 tasks": [k for k in ahead if k[1:4] == ("main", "", arm)] for arm in ARMS},
        **{f"{w}, adamw": [k for k in leads if k.world == w and k.arm == "adamw"] for w in others},
        **{f"{w}, all arms": [k for k in leads if k.world == w and k.axis == "main"] for w in others},
    }
    rows = []
    for name, keys in groups.items():
        seeds = sorted({k.seed for k in keys})
        means = [statistics.mean(leads[k] for k in keys if k.seed == seed) for seed in seeds]
        above = sum(leads[k] > 0 for k in keys)
        by_seed = ", ".join(f"{m:+.2f}" for m in means)
        rows.append(
            [name, f"{above} of {len(keys)}", by_seed, show_spread(means, "+.2f"), f"{run_t_test(means):.2g}"]
        )
    text += write_table(("experts", "EpiMer is ahead in", "by seed", "mean", "p"), rows) + "\n"
    text += "Other settings against the default, main cells of AdamW, points:\n\n"
    labels = (*EPIMERS, *(f"epimer samples {n}" for n in SAMPLES))
    rows = []
    for label in labels:
        row = [label.removeprefix("epimer ")]
        for world in results.list_worlds():
            lines = [results[k] for k in results if k[:4] == (world, "main", "", "adamw")]
            pairs = [(read_accuracy(line, label), read_accuracy(line, "epimer")) for line in lines]
            row.append(show_spread([a - b for a, b in pairs if a is not None and b is not None], "+.2f"))
        rows.append(row)
    text += write_table(("setting", *results.list_worlds()), rows) + "\n"
    text += (
        "Theorem 2: the bound on the mean rise of the experts' losses (nats), with Fishers as they are, and "
        "the rise that the theorem's merge has on the Fishers' samples.\n\n"
    )
    bounds = [
        [k.world, str(k.seed), *(f"{line['epimer'][n]:.3g}" for n in ("conflict", "residual", "bound", "rise")),
         " to ".join(f"{f(line['epimer']['fisher_traces'].values()):.3g}" for f in (min, max))]
        for k, line in results.items() if "epimer" in line
    ]  # fmt: skip
    return text + write_table(("world", "seed", "V", "R", "bound", "rise", "Fisher traces"), bounds) + "\n"


def report(lines: Sequence[Line]) -> str:
    """All tables."""
    results, fresh = (Results.from_lines(lines, seeds) for seeds in (SEEDS, FRESH_SEEDS))
    pooled = Results.from_lines(lines, (*SEEDS, *FRESH_SEEDS))
    axes = [axis for axis in ALONG if any(key.axis == axis for key in results)]
    return "\n".join([
        *(write_main_tables(results, world) for world in results.list_worlds()),
        *(write_axis_tables(results, axis) for axis in axes),
        *(write_task_tables(results, world) for world in results.list_worlds()),
        *(tabulate_predictions(results, world) for world in results.list_worlds()),
        tabulate_predictions_along(results),
        write_alignment_table(results),
        write_rho_table(results),
        write_language_model_table(),
        write_epimer_tables(results),
        *([write_repeat_tables(results, fresh, pooled)] if fresh else []),
        write_seconds_table(results),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files that study.py wrote")
    parser.add_argument("--figure", type=Path, help="of gains along the axes")
    parser.add_argument("--alignment", type=Path, help="figure of gains over the cosine between task vectors")
    options = parser.parse_args()
    everything = [line for path in options.results for line in read(path)]
    results = Results.from_lines(everything)
    left_out = sum(key.world not in results.list_worlds() for key in results)
    print(f"{len(results)} lines; {left_out} are of worlds without AdamW, and left out.\n")
    for line in everything:
        if "error" in line and (key := Key(*(line[name] for name in Key._fields))) not in results:
            print(f"- failed: {'/'.join(map(str, key))}: {line['error']}")
    print(report(everything))
    if options.figure or options.alignment:
        from drawing import draw_alignment, draw_axes

        if options.figure:
            draw_axes(results, options.figure)
        if options.alignment:
            draw_alignment(results, options.alignment)


if __name__ == "__main__":
    main()
