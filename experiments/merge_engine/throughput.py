"""Merges from files to files beside a plain copy of the same bytes, in one process.

    python experiments/merge_engine/throughput.py FOLDER --device cuda --out throughput.json

Writes a base and four experts of 468 M parameters in bfloat16 into FOLDER (unless they are there), so that they
lie in the page cache. A copy reads every input file and writes one of them, with an fsync; a merge does the
same and computes between. Seconds are those of the call alone, the best of the repeats; imports and the first
use of a GPU come before. A share of 1 is the speed of the copy.
"""

import argparse
import json
import os
import time
from datetime import date
from pathlib import Path

import torch
from compare import copy_inputs, list_inputs
from make_llama import list_shapes, write

import mergekit_lab
from mergekit_lab.merging import DARE, TIES, TaskArithmetic, WeightAverage

METHODS = {
    "average": WeightAverage(),
    "task_arithmetic": TaskArithmetic(coefficient=0.3),
    "dare": DARE(density=0.5),
    "ties_mergekit": TIES(density=0.2, preset="mergekit"),
    "ties": TIES(density=0.2),
}


def make(folder: Path, layers: int, device: str) -> None:
    plan = list_shapes(layers, 1024, 4096, 32000)
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    base = {name: (0.04 * draw(shape)).bfloat16() for name, shape in plan.items()}
    write(folder / "base", ((name, value.cpu()) for name, value in base.items()), 256 << 20)
    for t in range(4):
        noises = ((name, value, draw(plan[name])) for name, value in base.items())
        moved = ((name, (v.float() + 2e-3 * n * n.abs()).bfloat16().cpu()) for name, v, n in noises)
        write(folder / f"expert_{t}", moved, 256 << 20)
    for model in folder.iterdir():
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if not options.folder.is_dir():
        make(options.folder, options.layers, options.device)
    size = sum(file.stat().st_size for file in list_inputs(options.folder))
    copy = min(copy_inputs(options.folder, options.folder / "copy") for _ in range(options.repeats))
    report = {
        "date": str(date.today()),
        "card": torch.cuda.get_device_name() if options.device != "cpu" else f"{os.cpu_count()} cores",
        "torch": torch.__version__,
        "command": "experiments/merge_engine/throughput.py",
        "input_gb": round(size / 1e9, 2),
        "copy_seconds": round(copy, 3),
        "rows": [],
    }
    base, experts = options.folder / "base", sorted(options.folder.glob("expert_*"))
    for label, method in METHODS.items():
        times = []
        for _ in range(options.repeats + 1):
            begun = time.perf_counter()
            mergekit_lab.merge(
                base, experts, options.folder / "merged", method, device=options.device, overwrite=True
            )
            times.append(time.perf_counter() - begun)
        best = min(times[1:])
        row = {"method": label, "seconds": round(best, 3), "share_of_copy": round(copy / best, 2)}
        report["rows"].append(row)
        print(copy, row, flush=True)
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
