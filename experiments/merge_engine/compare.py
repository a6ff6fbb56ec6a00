"""Merge checkpoints beside mergekit: time, memory and equality, on the same inputs and disk in one run.

    python experiments/merge_engine/make_llama.py /tmp/llama
    python experiments/merge_engine/compare.py /tmp/llama --mergekit ENV/bin/mergekit-yaml --out cpu.json

Every merge is a process of its own, started from one mergekit recipe: ours by `+experiment=merge_checkpoints
recipe=…`, mergekit's by its own command. The time is that of the whole process, imports included (`imports`
is what ours take alone). Ours waits until the disk has the result, mergekit does not: `--results` in a
memory-backed folder compares what both compute. Memory is the peak of the process's anonymous pages
(`RssAnon`); mapped files are counted for nobody. `copy_seconds` is what it takes to read every input file and
write one model, with an fsync.
"""

import argparse
import compileall
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path

import torch
import yaml
from safetensors import safe_open

import mergekit_lab

METHODS = {
    "task_arithmetic": {"merge_method": "task_arithmetic", "weight": 0.3},
    "ties": {"merge_method": "ties", "weight": 1.0, "density": 0.2},
    "dare_linear": {"merge_method": "dare_linear", "weight": 0.3, "density": 0.5},
}


def write_recipe(folder: Path, method: str) -> Path:
    plan = dict(METHODS[method])
    parameters = {key: plan.pop(key) for key in ("weight", "density") if key in plan}
    experts = sorted(path for path in folder.iterdir() if path.name.startswith("expert_"))
    content = {
        **plan,
        "base_model": str(folder / "base"),
        "models": [{"model": str(path), "parameters": parameters} for path in experts],
        "dtype": "bfloat16",
        "parameters": {"normalize": method == "ties"},
    }
    path = folder / f"{method}.yml"
    path.write_text(yaml.safe_dump(content))
    return path


def list_inputs(folder: Path) -> list[Path]:
    return [file for pattern in ("base", "expert_*") for file in folder.glob(f"{pattern}/*.safetensors")]


def measure_anonymous(pid: int) -> int:
    """Anonymous resident bytes of a process and its children; 0 once it has gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    own = next((line for line in status.splitlines() if line.startswith("RssAnon")), "RssAnon: 0 kB")
    return int(own.split()[1]) * 1024 + sum(measure_anonymous(int(child)) for child in children)


def watch(command: list[str]) -> dict[str, float]:
    """Run a command; seconds, and the peak of its anonymous memory, sampled every 10 ms."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, measure_anonymous(process.pid))
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    seconds = time.perf_counter() - begun
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{output[-3000:]}")
    return {"seconds": round(seconds, 2), "anonymous_mb": round(peak / 1e6)}


def copy_inputs(folder: Path, out: Path) -> float:
    """Seconds to read every input and write as many bytes as one model has."""
    begun = time.perf_counter()
    buffer = bytearray(16 << 20)
    with out.open("wb") as target:
        for file in sorted(list_inputs(folder)):
            with file.open("rb", buffering=0) as source:
                while size := source.readinto(buffer):
                    if file.parent.name == "base":
                        target.write(memoryview(buffer)[:size])
        target.flush()
        os.fsync(target.fileno())
    out.unlink()
    return time.perf_counter() - begun


def compare_tensors(first: Path, second: Path) -> dict[str, float]:
    """How many entries of two merged folders differ, and by how much at most, in units of the last place."""

    def list_tensors(folder: Path) -> dict[str, Path]:
        files = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as handle:
                files |= dict.fromkeys(handle.keys(), file)
        return files

    ours, theirs = list_tensors(first), list_tensors(second)
    assert ours.keys() == theirs.keys()
    entries = other = 0
    worst = 0.0
    for name, file in ours.items():
        with safe_open(file, "pt") as a, safe_open(theirs[name], "pt") as b:
            x, y = a.get_tensor(name), b.get_tensor(name)
        entries += x.numel()
        other += int((x != y).sum())
        ordered = [v.view(torch.int16).int() for v in (x, y)]
        ordered = [torch.where(v < 0, -32768 - v, v) for v in ordered]
        worst = max(worst, float((ordered[0] - ordered[1]).abs().max()))
    return {"entries": entries, "differing": other, "most_units_in_the_last_place": worst}


def read_version(command: Path) -> str:
    python = command.parent / "python"
    asked = "from importlib.metadata import version; print(version('mergekit'))"
    return subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="absolute, or mergekit takes it for a hub id")
    parser.add_argument("--mergekit", type=Path, help="mergekit-yaml of an environment of its own")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, help="where merged models go; beside the inputs by default")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    files = list_inputs(options.folder)
    compileall.compile_dir(Path(mergekit_lab.__file__).parent, quiet=1)  # as pip leaves mergekit
    report = {
        "date": str(date.today()),
        "mergekit": read_version(options.mergekit) if options.mergekit else None,
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
        "torch": torch.__version__,
        "results": "memory" if options.results else "disk",
        "input_gb": round(sum(file.stat().st_size for file in files) / 1e9, 2),
        "copy_seconds": round(min(copy_inputs(options.folder, options.folder / "copy") for _ in range(2)), 2),
        "imports": watch([sys.executable, "-c", "import mergekit_lab.commands.merge_checkpoints"]),
        "rows": [],
    }
    for method in options.methods:
        plan = write_recipe(options.folder, method)
        for number in range(options.repeats):
            ours = [sys.executable, "-m", "mergekit_lab", "+experiment=merge_checkpoints", f"recipe={plan}"]
            results = options.results or options.folder
            merged, theirs = results / f"ours_{method}", results / f"theirs_{method}"
            ours += [
                f"out={merged}",
                "overwrite=true",
                f"device={options.device}",
                f"run_dir={options.folder}/run",
            ]
            row = {"method": method, "repeat": number, "ours": watch(ours)}
            if options.mergekit:
                row["mergekit"] = watch([str(options.mergekit), str(plan), str(theirs), "--no-copy-tokenizer"])
                if method != "dare_linear":  # its masks are other random numbers
                    row["equality"] = compare_tensors(merged, theirs)
            report["rows"].append(row)
            print(row, flush=True)
            options.out.write_text(json.dumps(report, indent=1))
        if options.results:
            shutil.rmtree(merged)
            shutil.rmtree(theirs, ignore_errors=True)


if __name__ == "__main__":
    main()
