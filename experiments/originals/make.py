"""Outputs of the authors' own codes on the stored inputs of the golden tests.

    python experiments/originals/make.py pcb CLONE      # github.com/duguodong7/pcb-merging at 31fa2dc
    python experiments/originals/make.py lines CLONE    # github.com/wang-kee/LiNeS at 04858ad
    python experiments/originals/make.py doge CLONE     # github.com/tanganke/fusion_bench at 54c9e8c
    python experiments/originals/make.py ties_max CLONE # github.com/prateeky2806/ties-merging at 44e7891
    python experiments/originals/make.py emr CLONE      # github.com/harveyhuang18/EMR_Merging at cc225ec

Functions are taken out of the clones' files by name and run as they are; nothing of these files is kept here.
Of classes the methods are taken, without their bases.
What they return goes to `tests/data/golden/outputs`, as float32 task vectors.
"""

from __future__ import annotations

import argparse
import ast
import copy
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mergekit_lab.merging import DOGE

GOLDEN = Path(__file__).parents[2] / "tests" / "data" / "golden"


def take_functions(file: Path, names: Sequence[str]) -> dict[str, Any]:
    """These functions of a file, without running the rest of it."""
    tree = ast.parse(file.read_text())
    body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    scope: dict[str, Any] = {"torch": torch, "copy": copy}
    exec(compile(ast.Module(body=body, type_ignores=[]), str(file), "exec"), scope)
    return scope


def take_methods(file: Path, name: str, **known: Any) -> type:
    """The methods of a class of a file, without its bases, its constructor and what else stands in it."""
    tree = ast.parse(file.read_text())
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    cls.bases = []
    cls.body = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    scope: dict[str, Any] = {"torch": torch, "copy": copy, **known}
    exec(compile(ast.Module(body=[cls], type_ignores=[]), str(file), "exec"), scope)
    return scope[name]


def read_task_vectors() -> tuple[list[str], list[dict[str, Tensor]]]:
    base = load_file(GOLDEN / "inputs/base.safetensors")
    experts = [load_file(GOLDEN / f"inputs/expert_{t}.safetensors") for t in range(4)]
    names = sorted(name for name, value in base.items() if value.is_floating_point())
    return names, [{name: expert[name] - base[name] for name in names} for expert in experts]


def save(label: str, merged: dict[str, Tensor]) -> None:
    save_file({n: v.contiguous() for n, v in merged.items()}, GOLDEN / f"outputs/{label}.safetensors")


def flatten(names: list[str], deltas: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([torch.cat([delta[name].flatten() for name in names]) for delta in deltas])


def split(vector: Tensor, names: list[str], shaped: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = vector.split([shaped[name].numel() for name in names])
    return {n: part.view(shaped[n].shape) for n, part in zip(names, parts, strict=True)}


def make_pcb(clone: Path) -> None:
    original = take_functions(clone / "pcb-merging.py", ("normalize", "clamp", "act", "PCB_merge"))
    names, deltas = read_task_vectors()
    flat = flatten(names, deltas)
    for ratio in (0.1, 0.6):
        merged, *_ = original["PCB_merge"](flat, pcb_ratio=ratio)
        save(f"pcb_ratio{ratio}_T4", split(merged, names, deltas[0]))


def make_lines(clone: Path) -> None:
    original = take_functions(clone / "src/eval/eval.py", ("LiNeS_scaling",))
    names, deltas = read_task_vectors()
    total = {name: torch.stack([delta[name] for delta in deltas]).sum(dim=0) for name in names}
    scaled = original["LiNeS_scaling"](SimpleNamespace(vector=total), alpha=1 / 4, beta=0.5, num_blocks=2)
    save("lines_sum_beta0.5_T4", scaled.vector)


def make_ties_max(clone: Path) -> None:
    wanted = ("topk_values_mask", "resolve_zero_signs", "resolve_sign", "disjoint_merge")
    original = take_functions(clone / "src/utils/merge_utils.py", wanted)
    names, deltas = read_task_vectors()
    trimmed, _ = original["topk_values_mask"](flatten(names, deltas), K=20)
    merged = original["disjoint_merge"](trimmed, "dis-max", original["resolve_sign"](trimmed, "mass"))
    save("ties_paper_max_d0.2_T4", split(merged, names, deltas[0]))


def make_emr(clone: Path) -> None:
    """What all tasks share, before masks and rescalers."""
    original = take_functions(clone / "merge_vit/src/main_emr_merging.py", ("emr_merge",))
    shared, *_ = original["emr_merge"]([SimpleNamespace(vector=delta) for delta in read_task_vectors()[1]])
    save("emr_shared_T4", shared)


class StateDictModel:
    """What the originals ask of a model: its state dict."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def state_dict(self, keep_vars: bool = False) -> dict[str, Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.state = state


class ModelPool:
    """A base and its experts, as fusion_bench hands them over."""

    def __init__(self, base: dict[str, Tensor], experts: dict[str, dict[str, Tensor]]) -> None:
        self.model_names, self._states = list(experts), {"_pretrained_": base, **experts}

    def load_model(self, name: str) -> StateDictModel:
        return StateDictModel(dict(self._states[name]))


def make_doge(clone: Path) -> None:
    """In float64; the weights that are merged by name here are given names that the original knows."""
    file, log = clone / "fusion_bench/method/doge_ta/doge_ta.py", SimpleNamespace(info=print)
    known = {"nn": nn, "time": time, "OrderedDict": OrderedDict, "BaseModelPool": ModelPool, "log": log}
    original = take_methods(file, "DOGE_TA_Algorithm", **known)
    names, deltas = read_task_vectors()
    matrices = [n for n in names if DOGE().is_matrix(n, deltas[0][n].shape)]
    experts = {str(t): {f"encoder.{n}": delta[n].double() for n in matrices} for t, delta in enumerate(deltas)}
    base = {name: torch.zeros_like(value) for name, value in experts["0"].items()}
    for label, settings in {
        "doge_T4": {"subspace": 6, "K": 30, "lamda": 0.07},
        "doge_size0.3_density0.6_subspace2_T4": {"subspace": 2, "K": 60, "lamda": 0.3},
    }.items():
        run = original()
        vars(run).update(delta=None, config=SimpleNamespace(**settings), profile=nullcontext)
        run.fabric = SimpleNamespace(device=torch.device("cpu"), backward=lambda loss: loss.backward())
        run.print_profile_summary = lambda: None
        merged = run.run(ModelPool(base, experts)).state_dict()
        save(label, {n: merged[f"encoder.{n}"].detach().float() for n in matrices})


MAKERS = {
    "pcb": make_pcb,
    "lines": make_lines,
    "ties_max": make_ties_max,
    "emr": make_emr,
    "doge": make_doge,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=MAKERS)
    parser.add_argument("clone", type=Path)
    options = parser.parse_args()
    MAKERS[options.method](options.clone)
