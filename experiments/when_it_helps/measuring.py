"""One cell, worked through in this process: its experts, their merges, and what may explain how these do."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cells import (
    AT_FIXED,
    COUNTS,
    EPIMERS,
    FIXED,
    GRID,
    GROUPS,
    ON_AXES,
    PATIENCE,
    SAMPLES,
    SMALL,
    SMALL_SIZES,
    SMALL_TASKS,
    WORLDS,
    StudyCell,
    World,
)
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from mergekit_lab.analysis import Interference, measure_layers
from mergekit_lab.analysis.plane import Weights, cross_task_linearity, evaluate_plane, find_blocks
from mergekit_lab.batches import to_device
from mergekit_lab.checkpoints import open_checkpoint
from mergekit_lab.curvature import Hessian, top_eigenvalues, trace
from mergekit_lab.evaluation import choose_best, score, search_grid
from mergekit_lab.merging import Method, TaskArithmetic
from mergekit_lab.merging.inputs import open_inputs
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.reporting import Tracker
from mergekit_lab.runs.analyses.contract import read_states, sample
from mergekit_lab.runs.combine import merge_experts
from mergekit_lab.runs.curvature import declare_side_input, list_kinds
from mergekit_lab.runs.finetune import declare_fit, plan_settings, stage_finetune
from mergekit_lab.runs.mergers import build_mergers
from mergekit_lab.runs.run import Run
from mergekit_lab.runs.settle import settle
from mergekit_lab.schema.run import check

Values = dict[str, Any]
_SHARED: dict[str, Any] = {}
"""Tasks and backbones that the cells of a process have in common."""


def run_cell(cell: StudyCell, store: Path, more: Sequence[str] = (), small: bool = False) -> list[Values]:
    """Everything that is known of a cell: a line for it, and one for each subset of its tasks.

    Args:
        cell: what to run.
        store: where experts and Fishers are kept.
        more: further overrides.
        small: a dry run, on a fraction of the data.
    """
    world, clock = WORLDS[cell.world], LapClock()
    common = ("joint=false", "progress=false", "training.compile=false", f"seed={cell.seed}")
    lines = [*world.lines, *common, f"store.root={store}", *cell.lines]
    lines += [*(SMALL if small else ()), *more]
    folder = store / "runs" / cell.name.replace("/", "_").replace(" ", "-")
    run = compose_run(lines, folder, small)
    if cell.times_fit:
        fitted = run.obtain(declare_fit(run)).info["scale"]
        run = compose_run([*lines, f"optimizer.scale={cell.times_fit * fitted}"], folder, small)
        clock.note_lap("pilots")
    stage_finetune(run)
    clock.note_lap("finetune")
    mergers = build_methods(run, {name: {} for name in cell.mergers}, cell.seed)
    vectors = TaskVectorMeasures(run)
    names = list(run.tasks)
    size = replace(world, hessians=1, samples=16) if small else world
    known: Values = {
        "world": cell.world, "axis": cell.axis, "value": cell.value, "arm": cell.arm, "seed": cell.seed,
        "steps": plan_settings(run, next(iter(run.tasks))).steps, "base_norm": vectors.base_norm,
        "scale": run.plain["optimizer"].get("scale"), "rho": run.plain["optimizer"].get("rho"),
    }  # fmt: skip
    if cell.only_measures:
        known |= {"only_measures": True, **vectors.describe(names), "measures": measure(run, size)}
        clock.note_lap("measures")
        return [round_all({**known, "seconds": clock.laps, "machine": describe_machine()})]
    bench = Bench(run)
    known |= {"experts": bench.experts, "zero_shot": bench.zero_shot}
    if known["scale"] == "fit":
        known["scale"] = run.obtain(declare_fit(run)).info["scale"]
    clock.note_lap("evaluate experts")
    lines_out = []
    if not cell.only_subsets:
        merged = {label: bench.merge(run, method, label, names) for label, method in mergers.items()}
        lines_out.append({**known, "tasks": names, **vectors.describe(names), "mergers": merged})
        clock.note_lap("merge")
    if cell.has_subsets:
        for axis, value, chosen in draw_subsets(names, cell.seed):
            merged = {n: bench.merge(run, mergers[n], n, chosen) for n in ON_AXES}
            changed = {"axis": axis, "value": value, "tasks": chosen, "mergers": merged}
            lines_out.append({**known, **changed, **vectors.describe(chosen)})
        clock.note_lap("subsets")
    line = lines_out[0]
    if cell.is_measured:
        line["measures"] = measure(run, size)
        clock.note_lap("measures")
    if cell.is_main and cell.arm == "adamw" and not cell.is_fresh:
        line["mergers"] |= merge_variants(run, bench, cell.seed)
        line["epimer"] = compare_bound(run, cell.seed)
        clock.note_lap("epimer")
    line["seconds"] = clock.laps
    line["machine"] = describe_machine()
    del run, bench, vectors
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [round_all(each) for each in lines_out]


class LapClock:
    """Seconds of what was done one after the other."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def note_lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self._last = round(now - self._last, 2), now


def compose_run(lines: Sequence[str], folder: Path, small: bool = False) -> Run:
    """What `python -m mergekit_lab` makes of these overrides."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(find_conf_dir()), version_base="1.3"):
        cfg = compose("main", list(lines), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
        for number, (name, task) in enumerate(list(cfg.suite.tasks.items()) if small else []):
            task.update({k: n for part, n in SMALL_SIZES.items() if (k := f"{part}_size") in task})
            task.update({"sizes": SMALL_SIZES} if "sizes" in task else {})
            if number >= SMALL_TASKS:
                del cfg.suite.tasks[name]
    run = Run(check(settle(cfg)), folder, choices, _SHARED)
    run.tracker = Tracker()  # tells nobody
    return run


def build_methods(run: Run, changes: Mapping[str, Values], seed: int) -> dict[str, Method]:
    """Merging methods by label: the options of conf/merger that labels begin with, changed."""
    nodes: Any = OmegaConf.create({"seed": seed, "mergers": {}})
    for label, changed in changes.items():
        nodes.mergers[label] = OmegaConf.merge(
            OmegaConf.load(find_conf_dir() / "merger" / f"{label.split()[0]}.yaml"), changed
        )
    return {label: m.method for label, m in build_mergers(nodes.mergers, run.search, run.experts).items()}


def draw_subsets(names: Sequence[str], seed: int) -> list[tuple[str, str, list[str]]]:
    """Axis, value and tasks of the merges of some of the experts."""
    order = random.Random(seed).sample(list(names), len(names))
    counts = [("tasks", str(k), [t for t in names if t in order[:k]]) for k in COUNTS if k < len(names)]
    groups = [("likeness", label, list(group)) for label, group in GROUPS.items() if set(group) <= set(names)]
    return counts + groups


class TaskVectorMeasures:
    """The experts' task vectors, on the run's device."""

    def __init__(self, run: Run) -> None:
        floating = {n: t for n, t in run.base_state.items() if t.is_floating_point()}
        self.base_norm = float(torch.cat([t.flatten() for t in floating.values()]).double().norm())
        self._vectors = {
            task: torch.cat([(state[n] - t).flatten() for n, t in floating.items()]).to(run.device)
            for task, state in read_states(run, run.tasks).items()
        }

    def describe(self, tasks: Sequence[str]) -> Values:
        """Means over these tasks, and over their pairs."""
        vectors = torch.stack([self._vectors[t] for t in tasks])
        norms = vectors.norm(dim=1)
        cosines = (vectors @ vectors.T) / (norms[:, None] * norms)
        pairs = cosines[~torch.eye(len(tasks), dtype=torch.bool, device=vectors.device)]
        return {
            "norm": float(norms.mean()),
            "cosine": float(pairs.mean()),
        }


class Bench:
    """Scores of the base, the experts and merges of them.

    A method merges once, at coefficient 1: search, fixed coefficient and test are arithmetic on that.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        weights = Weights(run.model, run.base_state, read_states(run, run.tasks))
        weights.move({})
        self.zero_shot = self._score(run.tasks, "test")
        self.experts: dict[str, float] = {}
        self._validated: dict[str, float] = {}
        for task in run.tasks:
            weights.move({task: 1.0})
            self.experts |= self._score([task], "test")
            self._validated |= self._score([task], "validation")

    def merge(self, run: Run, method: Method, label: str, tasks: Sequence[str]) -> Values:
        """Test accuracies of some experts' merge: at the coefficient that validation chooses, at the fixed one.

        Args:
            run: whose experts and side inputs are merged; the bench's, or a variant of it.
            label: of the method, which begins with its option's name.
        """
        for side_input in list_kinds(method):
            for task in tasks:
                run.obtain(declare_side_input(run, side_input, task))
        has_one = type(method).with_coefficient is not Method.with_coefficient
        unit = merge_experts(run, method.with_coefficient(1.0) if has_one else method, tasks)
        weights = Weights(run.model, run.base_state, {"merged": unit})

        def score_test(coefficient: float) -> dict[str, float]:
            weights.move({"merged": coefficient})
            return self._score(tasks, "test")

        if not has_one:
            return {"coefficient": None, "accuracy": score_test(1.0)}

        def score_at(coefficient: float) -> Callable[[str, float], float]:
            weights.move({"merged": coefficient})
            return lambda task, share: self._score([task], "validation")[task]

        experts = {task: self._validated[task] for task in tasks}
        curve = search_grid(GRID, experts, score_at, prune=True, patience=PATIENCE)
        best = choose_best(curve)
        values: Values = {
            "coefficient": best.coefficient,
            "accuracy": score_test(best.coefficient),
            "curve": [(c.coefficient, c.normalized) for c in curve if not c.pruned],
        }
        if label in AT_FIXED:
            values["fixed"] = score_test(FIXED)
        return values

    def _score(self, tasks: Sequence[str] | Mapping[str, Any], part: Any) -> dict[str, float]:
        run = self._run
        size = run.cfg.evaluation_batch_size
        return {t: score(run.model, run.make_objective(t), part, batch_size=size).value for t in tasks}


def merge_variants(run: Run, bench: Bench, seed: int) -> Values:
    """EpiMer with other settings, one at a time, and with other numbers of samples in its Fishers."""
    tasks = list(run.tasks)
    methods = build_methods(run, EPIMERS, seed)
    merges = {label: bench.merge(run, method, label, tasks) for label, method in methods.items()}
    plain = build_methods(run, {"epimer": {}}, seed)["epimer"]
    for count in SAMPLES:
        other = run.vary({"curvature": {"samples": count}})
        merges[f"epimer samples {count}"] = bench.merge(other, plain, "epimer", tasks)
    return merges


def compare_bound(run: Run, seed: int, samples: int = 256) -> Values:
    """The bound of EpiMer's Theorem 2, and what its merge costs the experts on the samples of the Fishers.

    The theorem's merge is the curvature-weighted mean of all projections at coefficient 1, with Fishers as they
    are. It speaks of matrices; the loss is that of the whole model.
    """
    tasks = list(run.tasks)
    as_proved = {"aggregator": "mean", "coordinates": "full", "normalize": "none", "coefficient": 1.0}
    plain = build_methods(run, {"epimer": as_proved}, seed)["epimer"]
    files = {
        task: run.obtain(declare_side_input(run, "fisher", task)).find_file("fisher.safetensors")
        for task in tasks
    }
    fishers = {task: open_checkpoint(file, task) for task, file in files.items()}
    ends = read_states(run, tasks)
    total = Interference(tuple(tasks), has_fishers=True)
    inputs = open_inputs(run.base_state, ends, TaskArithmetic())
    for layer, traces in measure_layers(inputs, fishers=fishers, rank=32, device=run.device):
        total.add(layer, traces)
    chosen = {task: sample(run, task, "train", samples) for task in run.tasks}
    weights = Weights(run.model, run.base_state, {**ends, "merged": merge_experts(run, plain, tasks)})
    rises = []
    for task in tasks:
        losses = []
        for end in (task, "merged"):
            weights.move({end: 1.0})
            losses.append(chosen[task].score(run.model, run.cfg.evaluation_batch_size).loss)
        rises.append(losses[1] - losses[0])
    return {
        **total.bound.to_json(),
        "whole": total.bound.whole,
        "rise": sum(rises) / len(rises),
        "rises": dict(zip(tasks, rises, strict=True)),
        "fisher_traces": dict(zip(tasks, total.fisher_traces.tolist(), strict=True)),
    }


def measure(run: Run, world: World) -> Values:
    """Curvature at the experts, cross-task linearity and disentanglement; what fails says why in a line."""
    weights = Weights(run.model, run.base_state, read_states(run, run.tasks))
    names = list(run.tasks)
    pairs = [*pairwise(names), (names[-1], names[0])]
    chosen = {task: sample(run, task, "validation", 256) for task in run.tasks}
    size = run.cfg.evaluation_batch_size

    def measure_curvature() -> Values:
        tops, traces = [], []
        for task in names[: world.hessians]:
            weights.move({task: 1.0})
            one = sample(run, task, "train", world.samples)
            parts = one.index.split(world.at_once)
            batches = [to_device(one.objective.make_batch("train", part), run.device) for part in parts]
            hessian = Hessian(one.objective.with_head(run.model), batches, causal=one.objective.causal)
            top = top_eigenvalues(hessian, hessian.draw_vector(run.seed), iterations=10, tolerance=0.02)
            tops.append(top.values[0])
            traces.append(trace(hessian, hessian.draw_vector(), products=12, seed=run.seed).value)
        return {"eigenvalue": sum(tops) / len(tops), "trace": sum(traces) / len(traces)}

    def measure_linearity() -> Values:
        blocks = find_blocks(run.model)
        means = []
        for pair in pairs:
            both = [chosen[task] for task in pair]
            by_block = cross_task_linearity(run.model, blocks, weights, pair, both, batch_size=size)
            means.append(sum(by_block.values()) / len(by_block))
        return {"ctl": sum(means) / len(means)}

    def measure_disentanglement() -> Values:
        errors: dict[float, list[float]] = {FIXED: [], 1.0: []}
        for pair in pairs:
            on = {task: chosen[task] for task in pair}
            rows = evaluate_plane(run.model, weights, on, pair, list(errors), batch_size=size)
            for index, row in enumerate(rows):
                errors[list(errors)[index]].append(row["xi"][index] / 2)
        return {f"xi {alpha:g}": sum(values) / len(values) for alpha, values in errors.items()}

    results: Values = {}
    for part in (measure_curvature, measure_linearity, measure_disentanglement):
        try:
            results |= part()
        except Exception as error:
            results[f"no {part.__name__.removeprefix('measure_')}"] = shorten_error(error)
    return results


def shorten_error(error: Exception) -> str:
    """An error's kind and the beginning of its message."""
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"[:300]


def round_all(item: Any) -> Any:
    """Numbers with six digits."""
    if isinstance(item, float):
        return float(f"{item:.6g}")
    if isinstance(item, Mapping):
        return {name: round_all(value) for name, value in item.items()}
    return [round_all(value) for value in item] if isinstance(item, list | tuple) else item


def describe_machine() -> str:
    """The card and torch's version."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{card}, torch {torch.__version__}"
