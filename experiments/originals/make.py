"""Outputs of the authors' own codes on the stored inputs of the golden tests.

    python experiments/originals/make.py pcb CLONE      # github.com/duguodong7/pcb-merging at 31fa2dc
    python experiments/originals/make.py lines CLONE    # github.com/wang-kee/LiNeS at 04858ad

Functions are taken out of the clones' files by name and run as they are; nothing of these files is kept here.
What they return goes to `tests/data/golden/outputs`, as float32 task vectors.
"""

from __future__ import annotations

import argparse
import ast
import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parents[2] / "tests" / "data" / "golden"


def take_functions(file: Path, names: Sequence[str]) -> dict[str, Any]:
    """These functions of a file, without running the rest of it."""
    tree = ast.parse(file.read_text())
    body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    found: dict[str, Any] = {"torch": torch, "copy": copy}
    exec(compile(ast.Module(body=body, type_ignores=[]), str(file), "exec"), found)
    return found


def read_task_vectors() -> tuple[list[str], list[dict[str, Tensor]]]:
    base = load_file(GOLDEN / "inputs/base.safetensors")
    experts = [load_file(GOLDEN / f"inputs/expert_{t}.safetensors") for t in range(4)]
    names = sorted(name for name, value in base.items() if value.is_floating_point())
    return names, [{name: expert[name] - base[name] for name in names} for expert in experts]


def save(label: str, merged: dict[str, Tensor]) -> None:
    save_file({n: v.contiguous() for n, v in merged.items()}, GOLDEN / f"outputs/{label}.safetensors")


def make_pcb(clone: Path) -> None:
    original = take_functions(clone / "pcb-merging.py", ("normalize", "clamp", "act", "PCB_merge"))
    names, deltas = read_task_vectors()
    flat = torch.stack([torch.cat([delta[name].flatten() for name in names]) for delta in deltas])
    for ratio in (0.1, 0.6):
        merged, *_ = original["PCB_merge"](flat, pcb_ratio=ratio)
        parts = merged.split([deltas[0][name].numel() for name in names])
        state = {n: part.view(deltas[0][n].shape) for n, part in zip(names, parts, strict=True)}
        save(f"pcb_ratio{ratio}_T4", state)


def make_lines(clone: Path) -> None:
    original = take_functions(clone / "src/eval/eval.py", ("LiNeS_scaling",))
    names, deltas = read_task_vectors()
    total = {name: torch.stack([delta[name] for delta in deltas]).sum(dim=0) for name in names}
    scaled = original["LiNeS_scaling"](SimpleNamespace(vector=total), alpha=1 / 4, beta=0.5, num_blocks=2)
    save("lines_sum_beta0.5_T4", scaled.vector)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("pcb", "lines"))
    parser.add_argument("clone", type=Path)
    given = parser.parse_args()
    {"pcb": make_pcb, "lines": make_lines}[given.method](given.clone)
