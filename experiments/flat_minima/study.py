"""Do flat minima merge better? Experts of many optimizers, merged six ways. See README.md.

python experiments/flat_minima/study.py --processes 14 --minutes 8 --store STORE --out results.json

Cells (an arm and a seed) that `--out` has are not run again, nor are experts that the store has: a study may be
made in pieces, each ended by `--minutes`.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergekit_lab.reporting.records import Record
    from mergekit_lab.runs.run import Run

TUNED = ("task_arithmetic", "ties", "dare", "tsvm", "epimer")
FIXED = 0.4
SEEDS = (0, 1, 2)

ARMS: dict[str, list[str]] = {
    "adamw": ["optimizer=adamw"],
    "sam": ["optimizer=sam"],
    "asam": ["optimizer=asam"],
    "mergopt laplace": ["optimizer=mergopt", "optimizer.scale=fit"],
    "mergopt gaussian": ["optimizer=mergopt", "optimizer.scale=fit", "optimizer.distribution=gaussian"],
    "mergopt 5e-4": ["optimizer=mergopt"],
}
OTHERS = ("swa", "rwp", "sagm", "wasam", "friendly_sam", "pgn", "ssamf", "ssamd")
KIN: dict[str, list[str]] = {
    **{name: [f"optimizer={name}"] for name in OTHERS},
    "sgd": ["optimizer=sgd", "training.lr=0.01", "training.weight_decay=1e-4"],
}
EQUAL_COST: dict[str, list[str]] = {
    f"{name}, half the steps": [f"optimizer={name}", "training.budget=gradient_evaluations"]
    for name in ("sam", "asam")
}
PARAMETRIZATIONS: dict[str, list[str]] = {
    f"{optimizer}, {finetuning}": [f"optimizer={optimizer}", f"finetuning={finetuning}"]
    for finetuning in ("attention_linear", "linearized")
    for optimizer in ("adamw", "asam")
}
SENSITIVITY: dict[str, list[str]] = {
    **{f"asam rho {rho:g}": ["optimizer=asam", f"optimizer.rho={rho}"] for rho in (0.25, 1.0, 2.0, 4.0)},
    **{f"mergopt b {b:g}": ["optimizer=mergopt", f"optimizer.scale={b}"] for b in (2.5e-4, 2e-3, 4e-3, 8e-3)},
    **{f"sam rho {rho:g}": ["optimizer=sam", f"optimizer.rho={rho}"] for rho in (0.02, 0.1, 0.2, 0.5)},
}


def list_cells() -> list[tuple[str, int]]:
    """What is to be run, the most important first."""
    order = [(arm, seed) for seed in SEEDS for arm in ARMS]
    for group in (KIN, EQUAL_COST, PARAMETRIZATIONS):
        order += [(arm, 0) for arm in group]
    order += [(arm, 0) for arm in SENSITIVITY]
    for seed in SEEDS[1:]:
        for group in (EQUAL_COST, KIN, PARAMETRIZATIONS, SENSITIVITY):
            order += [(arm, seed) for arm in group]
    return order


def make_overrides(arm: str, seed: int, store: Path, more: list[str]) -> list[str]:
    """The command line of a cell, without `python -m mergekit_lab`."""
    mergers = ["+merger@mergers.average=average"]
    for name in TUNED:
        inner = ".inner" if name == "dare" else ""
        mergers += [
            f"+merger@mergers.{name}={name}",
            f"+merger@mergers.{name}_fixed={name}",
            f"mergers.{name}_fixed{inner}.coefficient={FIXED}",
        ]
    groups = ARMS | KIN | EQUAL_COST | PARAMETRIZATIONS | SENSITIVITY
    common = ["suite=glyphs8", "joint=false", "progress=false", f"seed={seed}", f"store.root={store}"]
    return [*common, *groups[arm], *mergers, *more]


def run_cell(job: tuple[str, int, Path, list[str], float]) -> dict | None:
    arm, seed, store, more, deadline = job
    if time.time() > deadline:
        return None
    begun = time.time()
    try:
        scores = summarize(
            *run_stages(make_overrides(arm, seed, store, more), store / "runs" / f"{arm}-{seed}")
        )
    except Exception as error:
        print(f"{arm} {seed} failed: {type(error).__name__}: {error}", flush=True)
        return None
    return {
        "arm": arm,
        "seed": seed,
        "machine": describe_machine(),
        "seconds": round(time.time() - begun, 1),
    } | scores


def run_stages(lines: list[str], folder: Path) -> tuple:
    """What `python -m mergekit_lab` does with these overrides, and its records."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    from mergekit_lab.paths import find_conf_dir
    from mergekit_lab.programs import start
    from mergekit_lab.runs.report import collect, read_evaluations
    from mergekit_lab.runs.run import Run

    lines = [*lines, "stage=[finetune,curvature,merge,evaluate]"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(find_conf_dir()), version_base="1.3"):
        cfg = compose("main", lines, return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    start(cfg, folder, choices, lines)
    context = Run(cfg, folder, choices)
    return context, collect(context, read_evaluations(context))


def summarize(context: "Run", records: "Sequence[Record]") -> dict:
    """Accuracies by task, coefficients, validation curves, and the task vectors' size."""
    import torch

    from mergekit_lab.runs.finetune import declare_expert, declare_fit, plan_settings
    from mergekit_lab.runs.run import load_state
    from mergekit_lab.runs.search import declare_search, read_coefficient

    by_label: dict[str, dict[str, float]] = {}
    for r in records:
        by_label.setdefault(r.label, {})[r.task] = r.value
    coefficients = {label: read_coefficient(context, m) for label, m in context.mergers.items()}
    curves = {
        label: [
            (p["coefficient"], p["normalized"])
            for p in context.need(declare_search(context, label)).info["curve"]
        ]
        for label, m in context.mergers.items()
        if m.searched
    }
    vectors = []
    for task in context.tasks:
        state = load_state(context.need(declare_expert(context, task)))
        delta = [(state[n] - t).flatten() for n, t in context.base_state.items() if t.is_floating_point()]
        vectors.append(torch.cat(delta))
    fit = None
    if context.plain["optimizer"].get("scale") == "fit":
        fit = context.need(declare_fit(context)).info["scale"]
    return {
        "accuracy": by_label,
        "coefficient": coefficients,
        "curve": curves,
        "norm": sum(float(v.norm()) for v in vectors) / len(vectors),
        "mean_abs": sum(float(v.abs().mean()) for v in vectors) / len(vectors),
        "fitted_b": fit,
        "expert_seconds": [
            context.need(declare_expert(context, task)).info["wall_seconds"] for task in context.tasks
        ],
        "steps": plan_settings(context, next(iter(context.tasks))).steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e6, help="no cell is begun after so many")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="cells at most")
    parser.add_argument("--arms", nargs="+", help="these only, in this order of importance")
    parser.add_argument("overrides", nargs="*", help="further overrides of every cell")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kept = json.loads(options.out.read_text()) if options.out.exists() else {"fixed": FIXED, "cells": []}
    done = kept["cells"]
    ready = {(c["arm"], c["seed"]) for c in done}
    order = list_cells()
    if options.arms:
        order = [(arm, seed) for seed in SEEDS for arm in options.arms if (arm, seed) in order]
    left = [cell for cell in order if cell not in ready][: options.limit]
    deadline = time.time() + 60 * options.minutes
    begun = time.time()
    print(f"{len(left)} cells", flush=True)
    jobs = [(arm, seed, options.store.resolve(), options.overrides, deadline) for arm, seed in left]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        for cell in pool.imap_unordered(run_cell, jobs, chunksize=1):
            if cell is None:
                continue
            done.append(cell)
            mean = {k: 100 * sum(v.values()) / len(v) for k, v in cell["accuracy"].items()}
            shown = " ".join(f"{k} {v:.1f}" for k, v in mean.items() if not k.endswith("_fixed"))
            took = f"{time.time() - begun:.0f} s, {cell['seconds']:.0f} s, experts {cell['expert_seconds'][-1]}"
            print(f"{took} s, {cell['arm']}, seed {cell['seed']}: {shown}", flush=True)
            options.out.write_text(json.dumps(kept) + "\n")


def describe_machine() -> str:
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{card}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
