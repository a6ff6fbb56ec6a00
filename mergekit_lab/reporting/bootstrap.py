"""How sure an average is: bootstrap over test samples and seeds.

Test samples and seeds are drawn again with replacement, the same draw for all models of a group, so that two
models are compared on the samples they share (Efron 1979). Many samples are weighted by Poisson numbers of mean
1 instead of being drawn, which comes to the same (Hanley & MacGibbon 2006).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mergekit_lab.reporting.tables import Row, Table

Samples = Mapping[str, Any]
"""By evaluation key, what every test sample contributes to the metric, `[N]`, whose mean the value is."""

DRAWS = 1000
_AT_ONCE = 100
_MANY = 1000
"""Samples from which Poisson weights stand for the bootstrap's."""
_LEVEL = 0.95


def with_intervals(table: Table, samples: Samples, draws: int = DRAWS, seed: int = 0) -> Table:
    """The table with a 95 % interval of every average, and a mark on mergers that the best may not beat.

    A row that lacks the samples of one of its evaluations has no interval. Of each group the best merger is the
    one of highest average; another is marked `close` where the interval of their difference holds 0.
    """
    import numpy as np

    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(table.rows):
        if row.average.mean is not None and all(key in samples for _, _, key in row.evaluations):
            groups[row.group].append(place)
    rows = list(table.rows)
    for places in groups.values():
        members = [table.rows[place] for place in places]
        drawn = _averages(members, samples, draws, seed)
        if drawn is None:
            continue
        low, high = np.quantile(drawn, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], axis=0)
        merged = [i for i, row in enumerate(members) if row.kind == "merged"]
        best = max(merged, key=lambda i: members[i].average.mean or 0.0, default=None)
        for i, place in enumerate(places):
            close = False
            if best is not None and i in merged and i != best:
                from_, to = np.quantile(drawn[:, best] - drawn[:, i], [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
                close = bool(from_ <= 0 <= to)
            rows[place] = replace(rows[place], interval=(float(low[i]), float(high[i])), close=close)
    return replace(table, rows=tuple(rows), notes=(*table.notes, *_notes(rows)))


def _averages(rows: Sequence[Row], samples: Samples, draws: int, seed: int) -> Any:
    """Of every draw and row the mean over seeds and tasks, `[draws, rows]`; None where rows differ in parts."""
    import numpy as np

    parts = {(s, task) for s, task, _ in rows[0].evaluations}
    if any({(s, task) for s, task, _ in row.evaluations} != parts for row in rows):
        return None
    seeds, tasks = sorted({s for s, _ in parts}), sorted({task for _, task in parts})
    if len(parts) != len(seeds) * len(tasks):
        return None
    keys = [{(s, task): key for s, task, key in row.evaluations} for row in rows]
    if any(len({len(samples[found[s, t]]) for found in keys for s in seeds}) > 1 for t in tasks):
        return None  # the seeds have other test parts
    random = np.random.default_rng(seed)
    share = random.multinomial(len(seeds), [1 / len(seeds)] * len(seeds), size=draws) / len(seeds)
    total = np.zeros((draws, len(rows)))
    for task in tasks:
        values = np.stack([[samples[found[s, task]] for s in seeds] for found in keys]).astype(np.float32)
        flat = values.reshape(-1, values.shape[-1]).T
        for start in range(0, draws, _AT_ONCE):
            weights = _weights(random, min(_AT_ONCE, draws - start), len(flat))
            means = (weights @ flat / weights.sum(axis=1, keepdims=True)).reshape(
                len(weights), *values.shape[:2]
            )
            of_draws = slice(start, start + len(weights))
            total[of_draws] += np.einsum("brs,bs->br", means, share[of_draws])
    return total / len(tasks)


def _weights(random: Any, draws: int, size: int) -> Any:
    """How often each of `size` samples is drawn, `[draws, size]` in float32."""
    import numpy as np

    if size > _MANY:
        return random.poisson(1.0, (draws, size)).astype(np.float32)
    return random.multinomial(size, [1 / size] * size, size=draws).astype(np.float32)


def _notes(rows: Sequence[Row]) -> list[str]:
    close: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for row in rows:
        if row.close:
            close[row.group].append(row.label)
    said = "not distinguishable from the best average (95 %, bootstrap over test samples and seeds)"
    return [
        f"{' / '.join(group)}: {said}: {', '.join(labels)}." if group else f"N{said[1:]}: {', '.join(labels)}."
        for group, labels in close.items()
    ]
