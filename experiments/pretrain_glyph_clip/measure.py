"""How the shipped model does on the shipped tasks: zero-shot, experts, and three mergers. See README.md.

python experiments/pretrain_glyph_clip/measure.py --suite glyphs8 --seeds 2 --out results.json

All experts of a suite train at once: their weights are stacked `[T, …]` and the model is mapped over them.
AdamW works elementwise and gradients are clipped per expert, so each is what it would be if trained alone.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from mergekit_lab import tasks as rooms
from mergekit_lab.backbones import OpenClip
from mergekit_lab.merging import TSVM, TaskArithmetic, WeightAverage, merge_state_dicts
from mergekit_lab.merging.contract import Method
from mergekit_lab.tasks import ImageTask, Part

SUITES = {
    "glyphs8": ("Digits", "Mnist", "Latin", "Greek", "Cyrillic", "Math", "Accents", "Style"),
    "glyphs4": ("Digits", "Mnist", "Latin", "Style"),
}
GRID = [round(0.05 * i, 2) for i in range(1, 21)]
GRID_TSVM = [round(0.2 * i, 2) for i in range(1, 13)]
State = dict[str, Tensor]


class SuiteBench:
    """A suite's data, heads and encoder on one device."""

    def __init__(self, tasks: list[ImageTask], backbone: OpenClip, device: torch.device):
        self.tasks, self.device = tasks, device
        self.encoder = backbone.make_model().to(device)
        self.base: State = {k: v.detach().clone() for k, v in self.encoder.state_dict().items()}
        heads = [backbone.make_zero_shot_head(t.classes, t.templates).to(device) for t in tasks]
        self.heads = torch.zeros(len(tasks), max(map(len, heads)), heads[0].shape[1], device=device)
        self.absent = torch.zeros(self.heads.shape[:2], device=device)
        for i, head in enumerate(heads):
            self.heads[i, : len(head)] = head
            self.absent[i, len(head) :] = -1e4
        self.parts = {
            part: [
                (t.load_samples(part).images.to(device), t.load_samples(part).labels.to(device)) for t in tasks
            ]
            for part in rooms.PARTS
        }

    def train_experts(self, seed: int, steps: int, batch: int, lr: float, decay: float) -> list[State]:
        """AdamW, cosine after 10 % warm-up, per-expert gradient norm at most 1."""
        count = len(self.tasks)
        weights = {k: v.expand(count, *v.shape).clone().requires_grad_() for k, v in self.base.items()}
        optimizer = torch.optim.AdamW(weights.values(), lr=lr, weight_decay=decay)
        generator = torch.Generator().manual_seed(seed)
        orders = []
        for _, labels in self.parts["train"]:
            epochs = math.ceil(steps * batch / len(labels))
            orders.append(torch.cat([torch.randperm(len(labels), generator=generator) for _ in range(epochs)]))
        for step in range(steps):
            warm = max(1, steps // 10)
            share = (
                (step + 1) / warm
                if step < warm
                else 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))
            )
            for group in optimizer.param_groups:
                group["lr"] = lr * share
            chosen = [order[step * batch : (step + 1) * batch].to(self.device) for order in orders]
            images = torch.stack([data[0][c] for data, c in zip(self.parts["train"], chosen, strict=True)])
            labels = torch.stack([data[1][c] for data, c in zip(self.parts["train"], chosen, strict=True)])
            with sdpa_kernel(SDPBackend.MATH):  # the fused CPU kernel cannot be mapped over
                features = vmap(lambda w, x: functional_call(self.encoder, w, (x,)))(
                    weights, images.float() / 255
                )
            logits = features @ self.heads.mT + self.absent.unsqueeze(1)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) * count
            optimizer.zero_grad()
            loss.backward()
            square = torch.stack([(w.grad.flatten(1) ** 2).sum(1) for w in weights.values()]).sum(0)
            factor = (1 / (square.sqrt() + 1e-6)).clamp(max=1)
            for w in weights.values():
                w.grad *= factor.reshape(-1, *[1] * (w.dim() - 1))
            optimizer.step()
        return [{k: v[i].detach() for k, v in weights.items()} for i in range(count)]

    @torch.no_grad()
    def measure_accuracies(self, state: State, part: Part, only: int | None = None) -> list[float]:
        """Per cent, for all tasks or for `only` one."""
        percentages = []
        for i in range(len(self.tasks)) if only is None else [only]:
            images, labels = self.parts[part][i]
            features = functional_call(self.encoder, state, (images,))
            logits = features @ self.heads[i].T + self.absent[i]
            percentages.append(100 * (logits.argmax(1) == labels).float().mean().item())
        return percentages

    def find_best(self, direction: State, grid: list[float], references: list[float]) -> dict:
        """The coefficient best on validation by mean of accuracy / expert accuracy, and its test accuracies."""
        scores = {}
        for alpha in grid:
            values = self.measure_accuracies(self.move(direction, alpha), "validation")
            scores[alpha] = sum(v / r for v, r in zip(values, references, strict=True)) / len(values)
        alpha = max(scores, key=lambda a: scores[a])
        return {"coefficient": alpha, "test": self.measure_accuracies(self.move(direction, alpha), "test")}

    def compute_direction(self, experts: list[State], method: Method) -> State:
        """Merged minus base at coefficient 1. The methods are linear in it: one merge serves the whole grid."""
        cpu = [{k: v.cpu() for k, v in state.items()} for state in experts]
        base = {k: v.cpu() for k, v in self.base.items()}
        merged = merge_state_dicts(base, cpu, method, device=self.device)
        return {k: (merged[k] - v).to(self.device) for k, v in base.items()}

    def move(self, direction: State, alpha: float) -> State:
        return {k: v + alpha * direction[k] for k, v in self.base.items()}


def run_study(bench: SuiteBench, options: argparse.Namespace) -> dict:
    names = [task.name for task in bench.tasks]
    result: dict = {"tasks": names, "zero_shot": bench.measure_accuracies(bench.base, "test"), "seeds": []}
    for seed in range(options.seeds):
        start = time.perf_counter()
        experts = bench.train_experts(seed, options.steps, options.batch, options.lr, options.weight_decay)
        row: dict = {"seed": seed, "expert": [], "expert_validation": []}
        for i, state in enumerate(experts):
            row["expert"] += bench.measure_accuracies(state, "test", i)
            row["expert_validation"] += bench.measure_accuracies(state, "validation", i)
        average = bench.compute_direction(experts, WeightAverage())
        row["average"] = {
            "coefficient": 1.0,
            "test": bench.measure_accuracies(bench.move(average, 1.0), "test"),
        }
        total = bench.compute_direction(experts, TaskArithmetic(coefficient=1.0))
        row["task_arithmetic"] = bench.find_best(total, GRID, row["expert_validation"])
        row["tsvm"] = bench.find_best(
            bench.compute_direction(experts, TSVM(coefficient=1.0)), GRID_TSVM, row["expert_validation"]
        )
        row["norms"] = [
            sum(((s[k] - v) ** 2).sum().item() for k, v in bench.base.items()) ** 0.5 for s in experts
        ]
        row["seconds"] = time.perf_counter() - start
        result["seeds"].append(row)
    return result


def show(result: dict) -> None:
    def average(values):
        return sum(values) / len(values)

    seeds = result["seeds"]
    columns = {
        "zero": result["zero_shot"],
        "expert": [average(c) for c in zip(*(s["expert"] for s in seeds), strict=True)],
    }
    for key in ("average", "task_arithmetic", "tsvm"):
        columns[key] = [average(c) for c in zip(*(s[key]["test"] for s in seeds), strict=True)]
    print(f"{'':10s}" + "".join(f"{k[:8]:>9s}" for k in columns))
    for i, name in enumerate(result["tasks"]):
        print(f"{name:10s}" + "".join(f"{v[i]:9.1f}" for v in columns.values()))
    print(f"{'mean':10s}" + "".join(f"{average(v):9.1f}" for v in columns.values()))
    best = [(s["task_arithmetic"]["coefficient"], s["tsvm"]["coefficient"]) for s in seeds]
    norms = [round(average(c), 2) for c in zip(*(s["norms"] for s in seeds), strict=True)]
    print("coefficients", best, "norms", norms, "s", [round(s["seconds"], 1) for s in seeds], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", nargs="+", default=["glyphs4", "glyphs8"], choices=list(SUITES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights", default="asset:glyph_clip")
    parser.add_argument("--out", type=Path, help="JSON list of runs to append to")
    options = parser.parse_args()
    device = torch.device(options.device)
    card = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    runs = json.loads(options.out.read_text()) if options.out and options.out.exists() else []
    for suite in options.suite:
        chosen = [getattr(rooms, name)() for name in SUITES[suite]]
        bench = SuiteBench(chosen, OpenClip("glyph-clip", options.weights), device)
        used = {key: getattr(options, key) for key in ("steps", "batch", "lr", "weight_decay")}
        print(f"== {suite} {used} {options.weights}")
        numbers = run_study(bench, options)
        show(numbers)
        runs.append(
            {"suite": suite, "machine": f"{card}, torch {torch.__version__}", "arguments": used, **numbers}
        )
    if options.out:
        options.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
