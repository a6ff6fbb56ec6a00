"""Does what is measured on experts predict what SAM and ASAM gain? Tables of correlations."""

import math
import statistics
from itertools import product

import numpy as np
from cells import (
    ARMS,
    HALF_STEPS,
    MEASURED,
    ON_AXES,
    RHOS,
)
from results_by_cell import (
    FIXED_COLUMNS,
    Key,
    Results,
    find_point,
    measure_alignment,
    read_accuracy,
    read_measure,
    show_value,
)
from scipy.stats import spearmanr
from significance import correct_holm, correlate_settings
from writing import show_spread, write_table

MEASURES = ("norm", "length", "cosine", "eigenvalue", "trace", "ctl", "xi 0.4", "xi 1")
"""What may predict a gain; all but the cosine as the logarithm of the ratio to AdamW's. The length is that
of the average's step."""
WHERE_MEASURED = ("pretraining", *MEASURED["axes"])
"""Axes along which the sign changes, and experts were measured."""


def tabulate_predictions(results: Results, world: str) -> str:
    """Rank correlations of what was measured with the gain, over arms that are not AdamW's."""
    columns = (*ON_AXES, *FIXED_COLUMNS)
    arms = list(dict.fromkeys(k[:4] for k in results if k.world == world and k.axis in ("main", "rho")))
    groups = [arms, [arm for arm in arms if arm[1] == "main"]]
    points = {(n, c): [[p for arm in group if (p := find_point(results, arm, n, c))] for group in groups]
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
        f"{counts[1]} main arms alone. No p: points share AdamW's chance, and those along ρ are "
        "doses of one thing.\n\n"
        + write_table(("measure", *columns), rows)
        + "\n"
        + write_longer_steps(results, world)
    )


def write_longer_steps(results: Results, world: str) -> str:
    """What the average would gain if AdamW's own step were as long as the arm's."""
    rows = []
    for arm in ARMS:
        ratios, expected, gains = [], [], []
        for key in (Key(world, "main", "", arm, seed) for seed in results.list_seeds(world, "main", "", arm)):
            if (reference := results.find_reference(key)) == key or reference not in results:
                continue
            own, other = results[key], results[reference]
            ratios.append((read_measure(own, "length") or 0.0) / (read_measure(other, "length") or math.nan))
            count = len(other["tasks"])
            curve = np.array(other["mergers"]["task_arithmetic"]["curve"])
            low, high = np.interp([1 / count, ratios[-1] / count], *curve.T)
            expected.append((high - low) * (read_accuracy(other, "experts") or math.nan))
            gains.append(results.measure_gain(key, "average") or 0.0)
        if gains:
            rows.append(
                [arm, show_spread(ratios, ".2f"), show_spread(expected, "+.1f"), show_spread(gains, "+.1f")]
            )
    return (
        "The average's step beside AdamW's; what a step of that length along AdamW's own average would gain, "
        "read off the validation curve of AdamW's task arithmetic; and what the average gained on test.\n\n"
        + write_table(("arm", "length / AdamW's", "from length alone", "average's gain"), rows)
        + "\n"
    )


def tabulate_predictions_along(results: Results) -> str:
    """Rank correlations of what was measured with SAM's and ASAM's gains where their sign changes."""
    measured = [k[:4] for k, line in results.items() if "measures" in line]
    settings = [
        setting for setting in dict.fromkeys(k[1:3] for k in results)
        if setting[0] in ("main", *WHERE_MEASURED)
        and all(measured.count(("glyphs", *setting, arm)) > 1 for arm in ("adamw", *RHOS))
    ]  # fmt: skip
    if len(settings) < 5:
        return ""
    columns = (*ON_AXES, "experts")
    text = (
        "## glyphs: what predicts the sign?\n\nSpearman's ρ with the gains of SAM and ASAM at AdamW's steps, "
        f"over {len(settings)} settings: the main one, and along "
        f"{', '.join(dict.fromkeys(s[0] for s in settings if s[0] != 'main'))}. First of a measure as it "
        "differs from AdamW's, then of AdamW's own. In brackets p, from permuted settings, SAM's and ASAM's "
        "together; a star: p < .05 by Holm's correction for all of these.\n\n"
    )
    texts: dict[tuple[str, str], str] = {}
    chances: dict[tuple[str, str], float] = {}
    for own, name, column in product((False, True), MEASURES, columns):
        points = np.array([[find_point_along(results, setting, arm, name, column, own) for arm in RHOS]
                           for setting in settings])  # fmt: skip
        key = (f"AdamW's {name}" if own else name, column)
        rank, chances[key] = correlate_settings(points[..., 0], points[..., 1])
        texts[key] = f"{rank:+.2f} ({chances[key]:.2g})"
    stars = {key for key, p in correct_holm(chances).items() if p < 0.05}
    rows = [
        [name, *(texts[name, c] + " \\*" * ((name, c) in stars) for c in columns)]
        for name in dict.fromkeys(name for name, _ in texts)
    ]
    return text + write_table(("measure", *columns), rows) + "\n"


def find_point_along(
    results: Results, setting: tuple[str, str], arm: str, name: str, column: str, own: bool
) -> tuple[float, float]:
    """A measure, AdamW's own or how it differs from it, and the gain; not numbers where they are not there."""
    point = find_point(results, ("glyphs", *setting, arm), name, column)
    if point is None or not own:
        return point or (math.nan, math.nan)
    seeds = results.list_seeds("glyphs", *setting, "adamw")
    known = [read_measure(results[Key("glyphs", *setting, "adamw", seed)], name) for seed in seeds]
    return statistics.mean(v for v in known if v is not None), point[1]


def write_alignment_table(results: Results) -> str:
    """The same as a table, with rank correlations."""
    known = measure_alignment(results)
    columns = ("task_arithmetic", "ties", "tsvm", "epimer")
    rows = [
        [
            "/".join(map(show_value, filter(None, cell))),
            f"{points['ties'][0]:+.4f}",
            *(f"{points[c][1]:+.1f}" for c in columns),
        ]
        for cell, points in known.items()
    ]
    groups = {"all": list(known), "but for ρ": [cell for cell in known if cell[1] != "rho"]}
    ranks = [
        [f"Spearman, {name} {len(cells)}", "", *(f"{spearmanr([known[c][m] for c in cells]).statistic:+.2f}"
         for m in columns)] for name, cells in groups.items()
    ]  # fmt: skip
    own = {
        cell: statistics.mean(results[Key(*cell, seed)]["cosine"] for seed in results.list_seeds(*cell))
        for cell in known
    }
    for name, cells in groups.items():
        own_ranks = [spearmanr([(own[c], known[c][m][1]) for c in cells]).statistic for m in columns]
        ranks.append(
            [
                f"the same of SAM's or ASAM's own cosine, {name} {len(cells)}",
                "",
                *(f"{r:+.2f}" for r in own_ranks),
            ]
        )
    sets = {
        "before the rule": [
            c
            for c in groups["but for ρ"]
            if c[1] != "pretraining" and "1200" not in c[2] and c[2] != HALF_STEPS
        ],
        "after it, batch 256 × 150": [c for c in known if c[2] == HALF_STEPS],
        "after it, 1,200 steps": [c for c in known if "1200" in c[2]],
        "after it, second pretraining": [c for c in known if c[1] == "pretraining"],
        "after it, minilm's ρ": [c for c in known if c[:2] == ("minilm", "rho")],
    }
    for name, cells in sets.items():
        gains = {m: [known[c][m] for c in cells] for m in columns}
        obey = [sum((gain > 0) == (rise < 0.012) for rise, gain in g) for g in gains.values()]
        common = [max(n := sum(gain > 0 for _, gain in g), len(g) - n) for g in gains.values()]
        ranks.append([f"gain below a rise of .012, loss above, {name} {len(cells)}", "", *map(str, obey)])
        ranks.append([f"the commoner sign, {name} {len(cells)}", "", *map(str, common)])
    return (
        "## SAM and ASAM: the cosine between task vectors\n\nHow much larger its mean is than with AdamW, and "
        "gains in points.\n\n" + write_table(("cell", "cosine", *columns), [*rows, *ranks]) + "\n"
    )
