"""What a candidate of a weight search costs: inside one process, and as a process of its own.

    python experiments/merge_engine/make_llama.py /tmp/llama --layers 6 --hidden 512 --mlp 1408 \
        --vocabulary 8000 --experts 3
    python experiments/merge_engine/evolve.py /tmp/llama --mergekit ENV/bin/mergekit-yaml --out evolve.json

A candidate ends when its tensors are in the memory of the process that would evaluate them. The evaluation
itself costs all ways the same and is left out. `inside` runs the search itself, `search_cma_es` over
`merge_state_dicts`, as a run does; the first candidate's time, which reads the checkpoints, is told apart.
Seconds of a clock, and of processors, which say more where others use the machine too; each a median.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch
import yaml
from compare import read_version

from mergekit_lab.checkpoints import open_checkpoint
from mergekit_lab.evaluation import search_cma_es
from mergekit_lab.merging import DARE, TIES, TaskArithmetic, merge_state_dicts

METHODS = {
    "task_arithmetic": lambda weights: TaskArithmetic(coefficient=1.0, weights=weights),
    "ties": lambda weights: TIES(preset="mergekit", density=0.2, weights=weights),
    "dare_linear": lambda weights: DARE(density=0.5, inner=TaskArithmetic(coefficient=1.0, weights=weights)),
}
DENSITIES = {"ties": 0.2, "dare_linear": 0.5}


Cost = tuple[float, float]


def read_clocks() -> Cost:
    """Seconds that went by, and that processors spent on this process and on those that it waited for."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(each.ru_utime + each.ru_stime for each in spent)


def take(begun: Cost) -> Cost:
    wall, spent = read_clocks()
    return wall - begun[0], spent - begun[1]


def sum_up(costs: list[Cost]) -> dict[str, float]:
    wall, spent = (round(statistics.median(each), 3) for each in zip(*costs, strict=True))
    return {"seconds": wall, "processor_seconds": spent}


def search_inside(folder: Path, experts: list[Path], method: str, trials: int) -> list[Cost]:
    """The cost of each candidate, Optuna's share included."""
    begun = read_clocks()
    costs: list[Cost] = []
    base = dict(open_checkpoint(folder / "base").items())
    models = {path.name: dict(open_checkpoint(path).items()) for path in experts}
    model = {name: torch.empty_like(tensor) for name, tensor in base.items()}

    def make_score(point):
        nonlocal begun
        weights = dict(zip(models, point, strict=True))
        for name, tensor in merge_state_dicts(base, models, METHODS[method](weights)).items():
            model[name].copy_(tensor)
        costs.append(take(begun))
        begun = read_clocks()
        return lambda *_: 1 / (1 + sum((x - 0.3) ** 2 for x in point))

    search_cma_es(len(models), {"task": 1.0}, make_score, turns=range(trials))
    return costs


def merge_outside(folder: Path, experts: list[Path], method: str, weight: float, command: list[str]) -> Cost:
    """The cost of a candidate that is a process, which writes a folder that is then read."""
    parameters = {"weight": weight} | ({"density": DENSITIES[method]} if method in DENSITIES else {})
    recipe = {
        "merge_method": method,
        "base_model": str(folder / "base"),
        "models": [{"model": str(path), "parameters": parameters} for path in experts],
        "dtype": "bfloat16",
        "parameters": {"normalize": False},
    }
    plan, merged = folder / "candidate.yml", folder / "candidate"
    plan.write_text(yaml.safe_dump(recipe))
    begun = read_clocks()
    subprocess.run([each.format(plan=plan, out=merged) for each in command], check=True, capture_output=True)
    tensors = {name: tensor.clone() for name, tensor in open_checkpoint(merged).items()}
    assert tensors
    return take(begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="absolute, or mergekit takes it for a hub id")
    parser.add_argument("--mergekit", type=Path, help="mergekit-yaml of an environment of its own")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--trials", type=int, default=20, help="of the search inside")
    parser.add_argument("--repeats", type=int, default=3, help="of each process")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    experts = sorted(path for path in options.folder.iterdir() if path.name.startswith("expert_"))
    ours = [sys.executable, "-m", "mergekit_lab", "+experiment=merge_checkpoints", "recipe={plan}", "out={out}"]
    commands = {"our_process": [*ours, "overwrite=true", "device=cpu", f"run_dir={options.folder}/run"]}
    if options.mergekit:
        commands["mergekit"] = [str(options.mergekit), "{plan}", "{out}", "--no-copy-tokenizer"]
    files = [
        file for pattern in ("base", "expert_*") for file in options.folder.glob(f"{pattern}/*.safetensors")
    ]
    report = {
        "date": str(date.today()),
        "mergekit": read_version(options.mergekit) if options.mergekit else None,
        "machine": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch",
        "torch": torch.__version__,
        "experts": len(experts),
        "input_gb": round(sum(file.stat().st_size for file in files) / 1e9, 2),
        "rows": [],
    }
    for method in options.methods:
        inside = search_inside(options.folder, experts, method, options.trials)
        row = {
            "method": method,
            "first": sum_up(inside[:1]),
            "inside": sum_up(inside[1:]),
        }
        for name, command in commands.items():
            times = [
                merge_outside(options.folder, experts, method, 0.2 + 0.1 * turn, command)
                for turn in range(options.repeats)
            ]
            row[name] = sum_up(times)
        report["rows"].append(row)
        print(row, flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
