"""Several GPUs of one host: sweeps, data-parallel and sharded training, merges. See README.md.

    python experiments/multi_gpu/bench.py PART --out FOLDER             one of: sweep beside run ddp fsdp merge
    python experiments/multi_gpu/bench.py PART --out FOLDER --dry       tiny shapes, two CPU processes (gloo)

Every part appends rows to FOLDER/PART_LABEL.json as they are measured, and skips the rows that are there.
`--devices 2 3` picks cards; a part measures on as many as are named.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rows import PartRows
from torch import Tensor
from training import measure_ddp, measure_fsdp


def sweep(options: argparse.Namespace, rows: PartRows) -> None:
    rows.add(f"8 experts, {len(options.devices)} devices", lambda: _run_sweep(options))


def _run_sweep(options: argparse.Namespace) -> dict[str, Any]:
    devices = [f"cuda:{n}" for n in options.devices] if not options.dry else ["cpu"] * 2
    folder = options.out / f"store_{len(devices)}" if options.dry else Path(f"/tmp/sweep_{len(devices)}")
    seeds = range(2 if options.dry else 8)
    command = [
        *(sys.executable, "-m", "mergekit_lab", "-m", "hydra/launcher=local"),
        f"hydra.launcher.devices=[{','.join(devices)}]",
        *_list_expert_settings(options, folder),
        f"seed={','.join(map(str, seeds))}",
    ]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall = time.perf_counter() - begun
    jobs = [float(s) for s in re.findall(r"^#\d+ on \S+ done in ([\d.]+) s", done.stdout, re.MULTILINE)]
    if len(jobs) < len(seeds):
        raise RuntimeError((done.stdout + done.stderr)[-400:])
    return {
        "wall_seconds": round(wall, 2),
        "job_seconds": jobs,
        "training_seconds": _read_training_seconds(folder),
    }


def _list_expert_settings(options: argparse.Namespace, folder: Path) -> list[str]:
    """The settings of one expert of one task, for `python -m mergekit_lab`."""
    backbone = [f"backbone={options.backbone}", "backbone.weights=null"] if options.backbone else []
    return [
        *("+experiment=quickstart", "stage=finetune", "joint=false", "progress=false"),
        *("~suite.tasks.mnist", "~suite.tasks.style", "~suite.tasks.digits"),
        *(f"training.steps={options.steps}", f"store.root={folder}/store", f"run_dir={folder}/run"),
        *(["training.warmup_steps=1", "trainer.accelerator=cpu"] if options.dry else []),
        *backbone,
    ]


def _read_training_seconds(folder: Path) -> list[float]:
    """Seconds that each training in the store there took."""
    manifests = Path(folder, "store/experts").glob("*/manifest.json")
    return [json.loads(m.read_text())["info"]["wall_seconds"] for m in manifests]


def train_beside(options: argparse.Namespace, rows: PartRows) -> None:
    """What a host loses where trainings run at once that have nothing in common: what a sweep cannot win."""
    for count in (1, len(options.devices)):
        rows.add(f"trainings at once: {count}", partial(_measure_beside, options, count))


def _measure_beside(options: argparse.Namespace, count: int) -> dict[str, Any]:
    folders = [
        options.out / f"beside_{count}_{n}" if options.dry else Path(f"/tmp/beside_{count}_{n}")
        for n in range(count)
    ]
    running = []
    for folder, device in zip(folders, options.devices, strict=False):
        command = [sys.executable, "-m", "mergekit_lab", *_list_expert_settings(options, folder)]
        seen = {**os.environ, "CUDA_VISIBLE_DEVICES": str(device)}
        running.append(subprocess.Popen(command, env=seen, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError("a training failed; what it said stands above")
    return {"training_seconds": [seconds for folder in folders for seconds in _read_training_seconds(folder)]}


def run(options: argparse.Namespace, rows: PartRows) -> None:
    rows.add(f"8 tasks, {len(options.devices)} devices", lambda: _run(options))


def _run(options: argparse.Namespace) -> dict[str, Any]:
    """Experts, Fishers, coefficient searches and evaluations; what each kind took, summed over devices."""
    devices = [f"cuda:{n}" for n in options.devices] if not options.dry else ["cpu"] * 2
    folder = options.out / "run_store" if options.dry else Path(f"/tmp/run_{len(devices)}")
    command = [
        *(sys.executable, "-m", "mergekit_lab", "+experiment=quickstart", "joint=false", "progress=false"),
        *(f"device=[{','.join(devices)}]", f"store.root={folder}/store", f"run_dir={folder}/run"),
        *(["training.steps=2", "training.warmup_steps=1", "search.coefficients=[0.3]"] if options.dry else []),
        *([] if options.dry else ["suite=glyphs8", f"training.steps={options.steps}"]),
    ]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-400:])
    busy: dict[str, list[float]] = {}
    for manifest in Path(folder, "store").glob("*/*/manifest.json"):
        seconds = json.loads(manifest.read_text())["info"].get("wall_seconds", 0.0)
        busy.setdefault(manifest.parent.parent.name, []).append(seconds)
    kinds = {kind: {"pieces": len(each), "seconds": round(sum(each), 1)} for kind, each in sorted(busy.items())}
    return {"wall_seconds": round(wall, 2), "kinds": kinds}


def merge(options: argparse.Namespace, rows: PartRows) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "merge_engine"))
    from bench import SHAPES  # experiments/merge_engine

    from mergekit_lab.merging import TIES, TSVM, EpiMer

    methods = {"tsvm": TSVM(), "epimer": EpiMer(rank=32), "ties": TIES(density=0.2)}
    every = ["cpu", "cpu"] if options.dry else [f"cuda:{n}" for n in options.devices]
    for shape in ["tiny"] if options.dry else options.shapes:
        plan, experts, dtype, _ = SHAPES[shape]
        inputs = _make_inputs(plan, experts, dtype, every[0])
        for count in [1, 2] if options.dry else options.counts:
            for name, method in methods.items():
                devices = every[:count]
                rows.add(
                    f"{shape} {name} {count}",
                    partial(_merge_row, inputs, method, devices, options.repeats),
                )


def _make_inputs(
    plan: dict[str, Any], experts: int, dtype: torch.dtype, device: str
) -> list[dict[str, Tensor]]:
    """Base and experts in the host's memory; their squares serve as Fishers."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: Any) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    base = {n: (0.02 * draw(s)).to(dtype).cpu() for n, s in plan.items()}
    others = [
        {n: (b.to(device).float() + 1e-3 * draw(b.shape)).to(dtype).cpu() for n, b in base.items()}
        for _ in range(experts)
    ]
    return [base, *others]


def _merge_row(
    inputs: list[dict[str, Tensor]], method: Any, devices: list[str], repeats: int
) -> dict[str, Any]:
    """The first call, the median of those after it, and a digest of the result, equal where all bits are."""
    from mergekit_lab.merging import merge_state_dicts

    base, *experts = inputs
    named = {str(n): e for n, e in enumerate(experts)}
    squares = [{n: t.square() for n, t in e.items()} for e in experts] if method.side_inputs else None
    statistics = {"fisher": squares} if squares else None
    seconds = []
    for _ in range(1 + repeats):
        begun = time.perf_counter()
        merged = merge_state_dicts(base, named, method, statistics=statistics, device=devices)
        seconds.append(round(time.perf_counter() - begun, 4))
    digest = hashlib.blake2b(digest_size=16)
    for name in base:
        digest.update(merged[name].contiguous().view(torch.uint8).numpy())
    return {"first": seconds[0], "seconds": round(median(seconds[1:]), 4), "digest": digest.hexdigest()}


PARTS = {
    "sweep": sweep,
    "beside": train_beside,
    "run": run,
    "ddp": measure_ddp,
    "fsdp": measure_fsdp,
    "merge": merge,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, nargs="+", default=[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1], help="merge: how many of the devices")
    parser.add_argument("--shapes", nargs="+", default=["vit_l14", "llama_1b"])
    parser.add_argument("--repeats", type=int, default=2, help="merge: after the first call")
    parser.add_argument("--steps", type=int, default=500, help="sweep, beside, run: of an expert")
    parser.add_argument("--backbone", help="sweep, beside: with random weights, such as clip_vit_b32")
    parser.add_argument("--label", default=None)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    PARTS[options.part](options, PartRows(options))


if __name__ == "__main__":
    main()
