"""Do the gains of the first seeds repeat in fresh ones? Tables of both, and EpiMer's lead over TSV-M in all."""

import math
import statistics
from collections.abc import Sequence
from itertools import product

from cells import ARMS, FRESH_AT, MERGERS, ON_AXES, RHOS, SAME_COST
from results_by_cell import FIXED_COLUMNS, Cells, Results, measure_epimer_lead, show_value
from significance import analyze_variance, correct_holm, mark_along, mark_main, run_t_test
from writing import show_spread, write_table

Gain = tuple[Cells, str]
"""A cell of all seeds, and a column."""


def write_repeat_tables(first: Results, fresh: Results, pooled: Results) -> str:
    """Of main cells and of `FRESH_AT`.

    Args:
        first: lines of the seeds that the other tables are of.
        fresh: lines of seeds that none of them had.
        pooled: all of these.
    """
    text = (
        "## Fresh seeds\n\nGains in points, means of the first three seeds / of fresh ones: three in main "
        "cells, one or two along axes. A star at the latter: the first have one, too, and p < .05 by an "
        "analysis of variance over three fresh seeds alone, with Holm's correction for the first ones' "
        "stars.\n\n"
    )
    for world in fresh.list_worlds():
        columns = ("experts", *MERGERS, *FIXED_COLUMNS)
        arms = [arm for arm in ARMS if fresh.list_seeds(world, "main", "", arm)]
        claims = {((world, "main", "", arm), column) for arm, column in mark_main(first, world).starred}
        groups = {"": [(world, "main", "", arm) for arm in arms]}
        text += _write_pairs(f"{world}, main arms", first, fresh, groups, columns, claims)
        both = mark_main(pooled, world)
        bold = sum(p < 0.05 for p in both.paired.values())
        text += (
            f"Of {len(both.paired)} paired t-tests over all six seeds {bold} have p < .05 after Holm's "
            f"correction, and {len(both.starred)} by the analysis of variance.\n\n"
        )
    for axis, values in FRESH_AT.items():
        columns = ("experts", *ON_AXES, *FIXED_COLUMNS)
        by_value = {v: [("glyphs", axis, v, arm) for arm in ("adamw", *RHOS, *SAME_COST)] for v in values}
        groups = {v: [cell for cell in cells if fresh.list_seeds(*cell)] for v, cells in by_value.items()}
        tested = {cell for cells in groups.values() for cell in cells}
        claims = {gain for gain in mark_along(first, "glyphs", axis, columns) if gain[0] in tested}
        text += _write_pairs(f"glyphs, along {axis}", first, fresh, groups, columns, claims)
    return text + _write_epimer_leads(first, fresh, pooled)


def _write_pairs(
    title: str,
    first: Results,
    fresh: Results,
    groups: dict[str, list[Cells]],
    columns: Sequence[str],
    claims: set[Gain],
) -> str:
    chances: dict[Gain, float] = {}
    for cells, column in product(groups.values(), columns):
        own = analyze_variance(fresh, cells, column)[0] if len(cells) > 1 else {}
        chances |= {(cell, column): p for cell, p in own.items() if (cell, column) in claims}
    cells = [cell for group in groups.values() for cell in group if not cell[3].startswith("adamw")]
    means = {
        (results is fresh, cell, column): statistics.mean(results.list_gains(*cell, column) or [math.nan])
        for results, cell, column in product((first, fresh), cells, columns)
    }
    claimed = {gain for gain in product(cells, columns) if gain in claims}
    same = {gain for gain in claimed if means[False, *gain] * means[True, *gain] > 0}
    again = {gain for gain, p in correct_holm(chances).items() if p < 0.05 and gain in same}
    title += f": of {len(claimed)} stars {len(same)} keep their sign"
    title += f", and {len(again)} are beyond chance again" if chances else ""

    def show(cell: Cells, column: str) -> str:
        sides = [means[is_fresh, cell, column] for is_fresh in (False, True)]
        stars = ((cell, column) in claims, (cell, column) in again)
        return " / ".join(f"{mean:+.1f}" + " \\*" * star for mean, star in zip(sides, stars, strict=True))

    rows = [[show_value(cell[2]), cell[3], *(show(cell, c) for c in columns)] for cell in cells]
    return f"{title}.\n\n" + write_table(("value", "arm", *columns), rows) + "\n"


def _write_epimer_leads(first: Results, fresh: Results, pooled: Results) -> str:
    rows = []
    for world, arms in product(pooled.list_worlds(), (("adamw",), tuple(ARMS))):
        main = {
            k: line for k, line in pooled.items() if k.world == world and k.axis == "main" and k.arm in arms
        }
        leads = {k: lead for k, line in main.items() if (lead := measure_epimer_lead(line)) is not None}
        sides = [
            [statistics.mean(lead for k, lead in leads.items() if k.seed == seed) for seed in results.seeds]
            for results in (first, fresh)
        ]
        everything = [*sides[0], *sides[1]]
        rows.append([
            f"{world}, {'all arms' if arms[1:] else arms[0]}",
            f"{sum(lead > 0 for lead in leads.values())} of {len(leads)}",
            *(", ".join(f"{mean:+.2f}" for mean in side) for side in sides),
            show_spread(everything, "+.2f"),
            *(f"{run_t_test(side):.2g}" for side in (sides[1], everything)),
        ])  # fmt: skip
    head = ("experts", "EpiMer is ahead in", "first seeds", "fresh seeds", "mean", "p, fresh", "p, all")
    return "EpiMer − TSV-M in points, both tuned.\n\n" + write_table(head, rows) + "\n"
