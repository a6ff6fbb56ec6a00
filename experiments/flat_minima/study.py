"""Do flat minima merge better? Experts of many optimizers, merged six ways. See README.md.

python experiments/flat_minima/study.py --processes 14 --minutes 8 --store STORE --out results.json

Cells (an arm and a seed) that `--out` has already are not run again, experts that the store has neither: a study may
be made in pieces, each ended by `--minutes`.
"""

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path

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
KIN: dict[str, list[str]] = {
    name: [f"optimizer={name}"]
    for name in ("swa", "rwp", "sagm", "wasam", "friendly_sam", "pgn", "ssamf", "ssamd")
}
EQUAL_COST: dict[str, list[str]] = {
    f"{name}, half the steps": [f"optimizer={name}", "training.budget=gradient_evaluations"]
    for name in ("sam", "asam")
}
PARAMETRISATIONS: dict[str, list[str]] = {
    f"{optimizer}, {finetuning}": [f"optimizer={optimizer}", f"finetuning={finetuning}"]
    for finetuning in ("attention_linear", "linearised")
    for optimizer in ("adamw", "asam")
}
SENSITIVITY: dict[str, list[str]] = {
    **{f"asam rho {rho:g}": ["optimizer=asam", f"optimizer.rho={rho}"] for rho in (0.25, 1.0, 2.0, 4.0)},
    **{f"mergopt b {b:g}": ["optimizer=mergopt", f"optimizer.scale={b}"] for b in (2.5e-4, 2e-3, 4e-3, 8e-3)},
    **{f"sam rho {rho:g}": ["optimizer=sam", f"optimizer.rho={rho}"] for rho in (0.02, 0.1, 0.2, 0.5)},
}


def cells() -> list[tuple[str, int]]:
    """What is to be run, the most important first."""
    order = [(arm, seed) for seed in SEEDS for arm in ARMS]
    for group in (KIN, EQUAL_COST, PARAMETRISATIONS):
        order += [(arm, 0) for arm in group]
    order += [(arm, 0) for arm in SENSITIVITY]
    for seed in SEEDS[1:]:
        for group in (EQUAL_COST, KIN, PARAMETRISATIONS, SENSITIVITY):
            order += [(arm, seed) for arm in group]
    return order


def overrides(arm: str, seed: int, store: Path, more: list[str]) -> list[str]:
    """The command line of a cell, without `python -m mergekit_lab`."""
    mergers = ["+merger@mergers.average=average"]
    for name in TUNED:
        inner = ".inner" if name == "dare" else ""
        mergers += [
            f"+merger@mergers.{name}={name}",
            f"+merger@mergers.{name}_fixed={name}",
            f"mergers.{name}_fixed{inner}.coefficient={FIXED}",
        ]
    groups = ARMS | KIN | EQUAL_COST | PARAMETRISATIONS | SENSITIVITY
    common = ["suite=glyphs8", "joint=false", "progress=false", f"seed={seed}", f"store.root={store}"]
    return [*common, *groups[arm], *mergers, *more]


def run_cell(job: tuple[str, int, Path, list[str], float]) -> dict | None:
    arm, seed, store, more, deadline = job
    if time.time() > deadline:
        return None
    import logging

    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    from mergekit_lab.paths import conf_dir
    from mergekit_lab.stages.config import check
    from mergekit_lab.stages.context import Context
    from mergekit_lab.stages.run import STAGES

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    begun = time.time()
    lines = overrides(arm, seed, store, more)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("main", lines, return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    folder = store / "runs" / f"{arm}, seed {seed}".replace(" ", "_")
    check(cfg)
    context = Context(cfg, folder, choices)
    for name in ("finetune", "curvature", "merge", "evaluate"):
        with context.timed(name):
            STAGES[name](context)
    from mergekit_lab.stages.report import collect

    records = collect(context)
    found = {"arm": arm, "seed": seed, "seconds": round(time.time() - begun, 1)}
    return found | {"stages": {n: t.seconds for n, t in context.timings.items()}} | summary(context, records)


def summary(context, records) -> dict:
    """Accuracies by task, coefficients, validation curves, and the task vectors' size."""
    from mergekit_lab.stages.context import load_state
    from mergekit_lab.stages.merge import chosen_coefficient, search

    by_label: dict[str, dict[str, float]] = {}
    for r in records:
        by_label.setdefault(r.label, {})[r.task] = r.value
    coefficients = {label: chosen_coefficient(context, m) for label, m in context.mergers.items()}
    curves = {
        label: [(p["coefficient"], p["normalised"]) for p in search(context, m).info["curve"]]
        for label, m in context.mergers.items()
        if m.searched
    }
    sizes = []
    for task in context.tasks:
        state = load_state(context.expert(task))
        delta = [(state[n] - t).flatten() for n, t in context.base_state.items() if t.is_floating_point()]
        sizes.append({"norm": float(sum(d.square().sum() for d in delta) ** 0.5),
                      "mean_abs": float(sum(d.abs().sum() for d in delta) / sum(d.numel() for d in delta))})  # fmt: skip
    mean = {name: sum(s[name] for s in sizes) / len(sizes) for name in sizes[0]}
    fit = None
    if context.plain["optimizer"].get("scale") == "fit":
        fit = context.store.find("fits", context.fit_content()).info["scale"]
    return {
        "accuracy": by_label,
        "coefficient": coefficients,
        "curve": curves,
        "task_vector": mean,
        "fitted_b": fit,
    }


def prepare() -> None:
    """Draw all tasks before the processes part, so that they share them."""
    from hydra import compose, initialize_config_dir

    from mergekit_lab.paths import conf_dir
    from mergekit_lab.stages.checking import build
    from mergekit_lab.tasks import PARTS

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("main", ["suite=glyphs8"])
    for node in cfg.suite.tasks.values():
        task = build(node)
        [task.split(part) for part in PARTS]
        task.fingerprint()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e6, help="no cell is begun after so many")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="cells at most")
    parser.add_argument("overrides", nargs="*", help="further overrides of every cell")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    done = json.loads(options.out.read_text())["cells"] if options.out.exists() else []
    ready = {(c["arm"], c["seed"]) for c in done}
    left = [cell for cell in cells() if cell not in ready][: options.limit]
    deadline = time.time() + 60 * options.minutes
    begun = time.time()
    prepare()
    print(f"tasks drawn in {time.time() - begun:.0f} s; {len(left)} cells", flush=True)
    jobs = [(arm, seed, options.store.resolve(), options.overrides, deadline) for arm, seed in left]
    context = multiprocessing.get_context("fork")
    with context.Pool(options.processes, maxtasksperchild=8) as pool:
        for found in pool.imap_unordered(run_cell, jobs, chunksize=1):
            if found is None:
                continue
            done.append(found)
            mean = {k: 100 * sum(v.values()) / len(v) for k, v in found["accuracy"].items()}
            shown = " ".join(f"{k} {v:.1f}" for k, v in mean.items() if not k.endswith("_fixed"))
            print(
                f"{time.time() - begun:5.0f} s {found['arm']} {found['seed']}: {shown}; {found['stages']}",
                flush=True,
            )
            options.out.write_text(json.dumps({"fixed": FIXED, "machine": machine(), "cells": done}) + "\n")


def machine() -> str:
    import subprocess

    import torch

    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        card = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        card = "CPU"
    return f"{card}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
