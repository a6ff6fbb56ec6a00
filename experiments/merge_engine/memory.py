"""Anonymous memory that merging a file takes on a CPU, beside the bound of the method's class.

    python experiments/merge_engine/memory.py --rows 4096 --columns 2048 --out results/cpu_memory.json

Experts of one matrix, read from files and written to one, every method in a process of its own.
What is measured is the peak of `RssAnon` above what the process held before, after a merge of a small matrix;
files that are mapped are not in it. Ends with an error that names the methods above their bounds, which are
those that `dry_run=true` states for any shape: 4 MiB, four results and two for every thread, and

- of methods that work in blocks eight blocks an expert and four more for every thread, and TIES' counters;
- of others `2 T + 16` times the largest matrix that is made, in float32. That is the tensor. Of CAT, KnOTS and
  Core Space it may be the square of its outputs, or the outputs times what the experts' inputs span of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from bench import FEWER, list_methods
from torch import Tensor

import mergekit_lab
from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.merging import CAT, TIES, Method
from mergekit_lab.merging.blocks import CPU_BLOCK
from mergekit_lab.merging.subspace import SubspaceMethod

NAME = "layers.0.mlp.up_proj.weight"


def measure_anonymous() -> int:
    """Bytes of this process that no file stands for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def make(folder: Path, rows: int, columns: int, experts: int, dtype: torch.dtype) -> None:
    """A base, its experts, their Fishers and Grams, each a folder with one file."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(rows, columns, generator=generator).to(dtype)

    def write(name: str, state: dict[str, Tensor]) -> None:
        (folder / name).mkdir(parents=True)
        write_tensors(folder / name / "model.safetensors", state)

    write("base", {NAME: base})
    for number in range(experts):
        change = 0.02 * torch.randn(rows, columns, generator=generator)
        write(f"expert{number}", {NAME: (base.float() + change).to(dtype)})
        write(f"fisher{number}", {NAME: torch.rand(rows, columns, generator=generator)})
        write(f"gram{number}", {NAME.removesuffix(".weight"): (number + 1) * torch.eye(columns)})


def merge(folder: Path, label: str) -> None:
    method = list_methods()[label]
    count = FEWER.get(label, len(list(folder.glob("expert?"))))
    sides = {
        side_input: [folder / f"{side_input.removeprefix('chained_')}{n}" for n in range(count)]
        for side_input in method.side_inputs
    }
    experts = [folder / f"expert{number}" for number in range(count)]
    mergekit_lab.merge(folder / "base", experts, folder / f"merged_{label}", method, statistics=sides)


def compute_bound(method: Method, rows: int, columns: int, experts: int, dtype: torch.dtype) -> int:
    """In MB; see above."""
    threads = torch.get_num_threads() if method.elementwise else 1
    held = (4 << 20) + (2 * threads + 4) * rows * columns * dtype.itemsize
    if method.elementwise:
        held += threads * 4 * CPU_BLOCK * (8 * experts + 4)
        if isinstance(getattr(method, "inner", method), TIES):
            held += (2 << 23) * threads * experts
        return round(held / 1e6)
    largest = rows * columns
    if isinstance(method, CAT | SubspaceMethod):
        sides = ((rows, experts * columns), (columns, experts * rows))
        largest = max(largest, *(side * min(side, others) for side, others in sides))
    return round((held + (2 * experts + 16) * largest * 4) / 1e6)


def measure(small: Path, large: Path, label: str, queue: Any) -> None:
    """In a process of its own: send what the merge of `large` takes."""
    merge(small, label)
    start = peak = measure_anonymous()
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, measure_anonymous())
            time.sleep(0.005)

    watching = threading.Thread(target=watch)
    watching.start()
    begun = time.monotonic()
    merge(large, label)
    over.set()
    watching.join()
    queue.put(
        {"method": label, "peak_mb": round((peak - start) / 1e6), "seconds": round(time.monotonic() - begun, 1)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--methods", nargs="+", default=list(list_methods()))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    report = {
        "date": str(date.today()), "torch": torch.__version__, "experts": options.experts,
        "threads": torch.get_num_threads(), "matrix": [options.rows, options.columns], "dtype": options.dtype,
        "rows": [],
    }  # fmt: skip
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder, "small"), Path(folder, "large")
        dtype = getattr(torch, options.dtype)
        make(small, 64, 48, options.experts, dtype)
        make(large, options.rows, options.columns, options.experts, dtype)
        for label in options.methods:
            queue = context.Queue()
            process = context.Process(target=measure, args=(small, large, label, queue))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{label} ended with {process.exitcode}")
            method, count = list_methods()[label], FEWER.get(label, options.experts)
            limit = compute_bound(method, options.rows, options.columns, count, dtype)
            report["rows"].append(queue.get(timeout=10) | {"experts": count, "bound_mb": limit})
            (large / f"merged_{label}").rename(large / "spent")
            shutil.rmtree(large / "spent")
            print(report["rows"][-1], flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    above = [row["method"] for row in report["rows"] if row["peak_mb"] > row["bound_mb"]]
    if above:
        raise SystemExit(f"above the bound: {', '.join(above)}")


if __name__ == "__main__":
    main()
