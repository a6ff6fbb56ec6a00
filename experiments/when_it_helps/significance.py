"""What chance would make of the study's gains: t-tests, variance over arms and seeds, permutations."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from cells import ARMS, MERGERS, SEEDS
from results_by_cell import (
    FIXED_COLUMNS,
    Cells,
    Key,
    Results,
    list_arms_along,
    read_accuracy,
)
from scipy.stats import rankdata, t, ttest_1samp, zscore

Array = npt.NDArray[np.float64]


def run_t_test(gains: Sequence[float]) -> float:
    """p of a paired t-test; not a number for fewer than three pairs, or where they do not vary."""
    if len(gains) < 3 or len(set(gains)) < 2:
        return math.nan
    return float(ttest_1samp(gains, 0.0).pvalue)


def analyze_variance(
    results: Results, cells: Sequence[Cells], column: str
) -> tuple[dict[Cells, float], float, int]:
    """p of each cell of all seeds against its AdamW's by a two-way analysis of variance: seeds are blocks.

    With it the standard error of a difference of two, and its degrees of freedom. All cells together say how
    much one varies, on the premise that they vary alike: many more degrees of freedom than the two of a paired
    t-test.
    """
    seeds = sorted(set.intersection(*(set(results.list_seeds(*cell)) for cell in cells)))
    if len(seeds) < 2:
        return {}, math.nan, 1
    known = {cell: [read_accuracy(results[Key(*cell, s)], column) for s in seeds] for cell in cells}
    table = np.array(list(known.values()), dtype=float)
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    freedom = (len(cells) - 1) * (len(seeds) - 1)
    error = math.sqrt(2 * (rest**2).sum() / freedom / len(seeds))
    chances = {}
    for cell, own in zip(known, table, strict=True):
        reference = results.find_reference(Key(*cell, seeds[0]))[:4]
        chances[cell] = float(2 * t.sf(abs(own.mean() - np.mean(known[reference])) / error, freedom))
    return chances, error, freedom


class Marks(NamedTuple):
    """Of the gains of a world's main cells, by arm and column.

    Attributes:
        paired: p-values of paired t-tests, corrected by Holm's method for all of them.
        starred: those under .05 by `analyze_variance`, corrected alike.
        spreads: of each column, the standard error of a difference and its degrees of freedom.
    """

    paired: dict[tuple[str, str], float]
    starred: set[tuple[str, str]]
    spreads: list[tuple[float, int]]


def mark_main(results: Results, world: str) -> Marks:
    """Which gains of a world's main cells are beyond chance."""
    columns = ("experts", *MERGERS, *FIXED_COLUMNS)
    arms = [arm for arm in ARMS if results.list_seeds(world, "main", "", arm)]
    cells: list[Cells] = [(world, "main", "", arm) for arm in arms]
    names = [(arm, c) for arm in arms if not arm.startswith("adamw") for c in columns]
    paired = correct_holm(
        {(arm, c): run_t_test(results.list_gains(world, "main", "", arm, c)) for arm, c in names}
    )
    blocks = {c: analyze_variance(results, cells, c) for c in columns}
    pooled = correct_holm({(arm, c): blocks[c][0].get((world, "main", "", arm), math.nan) for arm, c in names})
    starred = {name for name, p in pooled.items() if p < 0.05}
    return Marks(paired, starred, [(error, freedom) for _, error, freedom in blocks.values()])


def mark_along(results: Results, world: str, axis: str, columns: Sequence[str]) -> set[tuple[Cells, str]]:
    """The gains along an axis with p < .05: `analyze_variance` at each value, corrected for their number."""
    whole = [c for c in results.list_cells() if c[0] == world and len(results.list_seeds(*c)) == len(SEEDS)]
    values = dict.fromkeys(c[2] for c in whole if c[1] == axis)
    groups = [[c for c in whole if c[1:3] == (axis, value)] for value in values]
    if axis == "rho":
        groups = [
            [c for c in whole if c[1] == axis or (c[1] == "main" and c[3] in ("adamw", *list_arms_along(axis)))]
        ]
    tested = {
        (cell, column): p
        for group, column in product(groups, columns) if len(group) > 1 and any(c[3] == "adamw" for c in group)
        for cell, p in analyze_variance(results, group, column)[0].items()
        if cell[1] == axis and cell[3] != "adamw"
    }  # fmt: skip
    return {name for name, p in correct_holm(tested).items() if p < 0.05}


def correct_holm(values: dict[Any, float]) -> dict[Any, float]:
    """p-values corrected for their number by Holm's method."""
    known = sorted((p, name) for name, p in values.items() if not math.isnan(p))
    corrected, highest = dict.fromkeys(values, math.nan), 0.0
    for index, (p, name) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - index)))
        corrected[name] = highest
    return corrected


def correlate_settings(x: Array, y: Array, draws: int = 20000) -> tuple[float, float]:
    """Spearman's ρ of `[settings, arms]`, and how often permuted settings have as large a one."""
    ranks = [zscore(rankdata(each)).reshape(each.shape) for each in (x, y)]
    order = np.random.default_rng(0).permuted(np.tile(np.arange(len(x)), (draws, 1)), axis=1)
    cross = ranks[0] @ ranks[1].T / x.size
    rank = float(cross.trace())
    permuted = cross[np.arange(len(x)), order].sum(1)
    return rank, float((1 + (abs(permuted) >= abs(rank) - 1e-9).sum()) / (1 + draws))
