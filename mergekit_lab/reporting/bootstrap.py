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

_DRAWS = 1000
_AT_ONCE = 100
_MANY = 1000
"""Samples from which Poisson weights stand for the bootstrap's."""
_LEVEL = 0.95


def add_intervals(table: Table, samples: Samples) -> Table:
    """The table with a 95 % interval of every average, and a mark on mergers that the best may not beat.

    Within a group, rows are compared if they have the same seeds, tasks and numbers of samples. The largest
    such set gets intervals. A note names the other rows. The best merger has the highest average. Another
    merger is marked `close` if the interval of their difference contains 0.
    """
    import numpy as np

    rows = list(table.rows)
    left_out: list[str] = []
    for group in table.groups:
        everything = [i for i, row in enumerate(rows) if row.group == group]
        keys = _keep_alike({i: rows[i] for i in everything}, samples)
        if not keys:
            continue
        members = [table.rows[i] for i in keys]
        drawn = _draw_averages(list(keys.values()), samples)
        odd = [
            rows[i].name
            for i in everything
            if i not in keys and rows[i].kind == "merged" and rows[i].average.mean is not None
        ]
        if odd:
            left_out.append(
                f"{' / '.join((*group, ', '.join(odd)))}: no interval, and left out where rows are compared "
                "with the best, because seeds or test samples are not those of the rest of the group."
            )
        low, high = np.quantile(drawn, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], axis=0)
        merged = [i for i, row in enumerate(members) if row.kind == "merged"]
        best = max(merged, key=lambda i: members[i].average.mean or 0.0, default=None)
        for i, position in enumerate(keys):
            close = False
            if best is not None and i in merged and i != best:
                from_, to = np.quantile(drawn[:, best] - drawn[:, i], [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
                close = bool(from_ <= 0 <= to)
            rows[position] = replace(rows[position], interval=(float(low[i]), float(high[i])), close=close)
    return replace(table, rows=tuple(rows), notes=(*table.notes, *_write_notes(table, rows), *left_out))


Keys = Mapping[tuple[int, str], str]
"""Evaluation keys of a row by seed and task; every seed has every task."""


def _keep_alike(rows: Mapping[int, Row], samples: Samples) -> dict[int, Keys]:
    """The largest set of rows that have the same seeds, tasks and numbers of samples, by position."""
    tasks = {task for row in rows.values() for _, task, _ in row.evaluations}
    alike: dict[Any, dict[int, Keys]] = defaultdict(dict)
    for position, row in rows.items():
        by_seed: dict[int, dict[str, str]] = defaultdict(dict)
        for seed, task, key in row.evaluations:
            by_seed[seed][task] = key
        # the average is of these seeds
        whole = {seed: of_task for seed, of_task in by_seed.items() if set(of_task) == tasks}
        keys = {(seed, task): key for seed, of_task in whole.items() for task, key in of_task.items()}
        if not keys or not all(key in samples for key in keys.values()):
            continue
        sizes = {(task, len(samples[key])) for (_, task), key in keys.items()}
        if len(sizes) == len(tasks):  # else the seeds have other test parts
            alike[frozenset(whole), frozenset(sizes)][position] = keys
    return max(alike.values(), key=len, default={})


def _draw_averages(keys: Sequence[Keys], samples: Samples) -> Any:
    """The mean over seeds and tasks for every draw and row, `[draws, rows]`."""
    import numpy as np

    seeds, tasks = sorted({s for s, _ in keys[0]}), sorted({task for _, task in keys[0]})
    random = np.random.default_rng(0)
    share = random.multinomial(len(seeds), [1 / len(seeds)] * len(seeds), size=_DRAWS) / len(seeds)
    total = np.zeros((_DRAWS, len(keys)))
    for task in tasks:
        values = np.stack([[samples[of_row[s, task]] for s in seeds] for of_row in keys]).astype(np.float32)
        flat = values.reshape(-1, values.shape[-1]).T
        for start in range(0, _DRAWS, _AT_ONCE):
            weights = _draw_weights(random, min(_AT_ONCE, _DRAWS - start), len(flat))
            means = (weights @ flat / weights.sum(axis=1, keepdims=True)).reshape(
                len(weights), *values.shape[:2]
            )
            of_draws = slice(start, start + len(weights))
            total[of_draws] += np.einsum("brs,bs->br", means, share[of_draws])
    return total / len(tasks)


def _draw_weights(random: Any, draws: int, size: int) -> Any:
    """How often each of `size` samples is drawn, `[draws, size]` in float32."""
    import numpy as np

    if size > _MANY:
        return random.poisson(1.0, (draws, size)).astype(np.float32)
    return random.multinomial(size, [1 / size] * size, size=draws).astype(np.float32)


def _write_notes(table: Table, rows: Sequence[Row]) -> list[str]:
    verdict = "not distinguishable from the best average (95 %, bootstrap over test samples and seeds)"
    close = {group: [row.name for row in rows if row.close and row.group == group] for group in table.groups}
    return [
        f"{' / '.join(group)}: {verdict}: {', '.join(names)}."
        if group
        else f"N{verdict[1:]}: {', '.join(names)}."
        for group, names in close.items()
        if names
    ]
