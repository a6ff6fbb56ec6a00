"""The study's lines by what they are of, and what is computed from a cell and AdamW's beside it."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cells import ALONG, ARMS, AT_FIXED, CORE, FIXED, HALF_STEPS, RHOS, SAME_COST, SAME_COST_AT, SEEDS

Line = dict[str, Any]
Cells = tuple[str, str, str, str]
"""World, axis, value and arm: those of all seeds."""
FIXED_COLUMNS = tuple(f"{name} at {FIXED:g}" for name in AT_FIXED)
"""Merges with a coefficient that was not chosen."""


class Key(NamedTuple):
    """Of a line."""

    world: str
    axis: str
    value: str
    arm: str
    seed: int


class Results(dict[Key, Line]):
    """Lines of some seeds by what they are of."""

    def __init__(self, seeds: Sequence[int] = SEEDS) -> None:
        super().__init__()
        self.seeds = seeds

    @classmethod
    def from_lines(cls, lines: Iterable[Line], seeds: Sequence[int] = SEEDS) -> "Results":
        """The latest good line of each cell, with what was measured apart."""
        results, apart = cls(seeds), {}
        for line in lines:
            if "error" not in line and line["seed"] in seeds:
                into = apart if line.get("only_measures") else results
                into[Key(*(line[name] for name in Key._fields))] = line
        for key in results.keys() & apart.keys():
            results[key] = {**results[key], "measures": apart[key]["measures"]}
        for key, line in list(results.items()):
            if key.value == "256" and key.arm in SAME_COST:  # as many steps as AdamW has at that value
                results[key._replace(value=HALF_STEPS, arm=key.arm.partition(",")[0])] = line
        return results

    def find_reference(self, key: Key) -> Key:
        """AdamW's cell that a cell is compared with; of values that AdamW does not have, the main one."""
        alike = f"adamw, {key.arm.partition(', ')[2]}"
        arm = alike if alike in ARMS else "adamw"
        return key._replace(arm=arm, axis="main", value="") if key.axis == "rho" else key._replace(arm=arm)

    def measure_gain(self, key: Key, column: str) -> float | None:
        """Of one cell; None where it or AdamW's does not have it."""
        own, other = (
            read_accuracy(self.get(key), column),
            read_accuracy(self.get(self.find_reference(key)), column),
        )
        return None if own is None or other is None else own - other

    def list_gains(self, world: str, axis: str, value: str, arm: str, column: str) -> list[float]:
        """Of every seed that both have, in the order of seeds."""
        keys = [Key(world, axis, value, arm, seed) for seed in self.list_seeds(world, axis, value, arm)]
        return [gain for key in keys if (gain := self.measure_gain(key, column)) is not None]

    def list_seeds(self, world: str, axis: str, value: str, arm: str) -> list[int]:
        return [seed for seed in self.seeds if Key(world, axis, value, arm, seed) in self]

    def list_cells(self) -> list[Cells]:
        """Those that have a seed."""
        return list(dict.fromkeys(k[:4] for k in self))

    def list_worlds(self) -> list[str]:
        """Those in which AdamW was measured: without it there is no gain."""
        return list(dict.fromkeys(k.world for k in self if k[1:4] == ("main", "", "adamw")))


def read_accuracy(line: Line | None, column: str) -> float | None:
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


def measure_epimer_lead(line: Line) -> float | None:
    """Its accuracy less that of TSV-M, both tuned."""
    ends = [read_accuracy(line, name) for name in ("epimer", "tsvm")]
    return None if None in ends else ends[0] - ends[1]  # type: ignore[operator]


def read_measure(line: Line, name: str) -> float | None:
    """A measure of a line, if it has it."""
    if name == "length":
        count = len(line["tasks"])
        return float(line["norm"] * math.sqrt((1 + (count - 1) * line["cosine"]) / count))
    value = line.get(name, line.get("measures", {}).get(name))
    return float(value) if value is not None else None


def list_values_along(results: Results, axis: str) -> list[tuple[str, str]]:
    """Axis and value of the lines along an axis in its order, the main cell among them."""
    order = [("main", "") if value is None else (axis, value) for value in ALONG[axis]]
    return [
        setting for setting in order if any(k.axis == setting[0] and k.value == setting[1] for k in results)
    ]


def list_arms_along(axis: str) -> list[str]:
    """Those that have cells along an axis."""
    if axis == "rho":
        return [*RHOS, *SAME_COST]
    return [*(arm for arm in CORE if arm != "adamw"), *(SAME_COST if axis in (*SAME_COST_AT, "tasks") else ())]


def show_value(value: str) -> str:
    """A value as tables and figures write it."""
    for own, short in (("5e-05", "5e-5"), ("0.0002", "2e-4"), ("0.0008", "8e-4"), (" x ", " × ")):
        value = value.replace(own, short)
    return value or "main"


def measure_alignment(results: Results) -> dict[Cells, dict[str, tuple[float, float]]]:
    """Of SAM and ASAM at every value of every axis: how much more alike task vectors are, and each gain."""
    cells = [cell for cell in results.list_cells() if cell[3] in RHOS]
    columns = ("task_arithmetic", "ties", "tsvm", "epimer")
    known = {cell: {c: p for c in columns if (p := find_point(results, cell, "cosine", c))} for cell in cells}
    return dict(sorted(((k, v) for k, v in known.items() if v), key=lambda each: each[1]["ties"][0]))


def find_point(results: Results, arm: Cells, name: str, column: str) -> tuple[float, float] | None:
    """A measure's difference to AdamW's and the gain, means over seeds; None where there are none."""
    changes, gains = [], []
    for key in (Key(*arm, seed) for seed in results.list_seeds(*arm)):
        reference = results.find_reference(key)
        if reference == key or reference not in results:
            continue
        own, other = (read_measure(results[k], name) for k in (key, reference))
        if own is None or other is None or (name != "cosine" and min(own, other) <= 0):
            continue
        gain = results.measure_gain(key, column)
        if gain is not None:
            changes.append(own - other if name == "cosine" else math.log(own / other))
            gains.append(gain)
    return (statistics.mean(changes), statistics.mean(gains)) if gains else None
