"""How long a plane of 21×21 merged models takes on two tasks of 2,000 images each, at CLIP ViT-B/32.

    python experiments/analysis/plane.py --out experiments/analysis/results/plane.json    # a GPU: three minutes
    python experiments/analysis/plane.py --out try.json --tiny                            # any CPU, in small

What is timed is what `analysis=landscape` and `analysis=disentanglement` call: every model is put together in
place, every task evaluated, losses, accuracies and ξ computed. Weights and images are random; validation images
stay on the GPU, as in a run. Seconds are wall clock, synchronized, without what loads model and images. Results
are written after every part.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergekit_lab.analysis.plane import Sample, Weights, evaluate_plane
from mergekit_lab.backbones import ImageObjective, OpenClip
from mergekit_lab.tasks import ImageSamples, ImageTask, Part

CLASSES = 100
PAIR = ("first", "second")


@dataclass(frozen=True, eq=False)
class NoisePictures(ImageTask):
    """Random images as evaluation reads them, with random labels."""

    images: int = 0
    side: int = 224
    seed: int = 0

    classes = tuple(map(str, range(CLASSES)))
    templates = ("{}",)

    def make(self, part: Part) -> ImageSamples:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.images, 3, self.side, self.side)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return ImageSamples(pixels, torch.randint(0, CLASSES, (self.images,), generator=generator))


@dataclass
class PlaneBench:
    """A model, two random experts of it, and two tasks."""

    model: nn.Module
    weights: Weights
    tasks: dict[str, Sample]
    alphas: list[float]
    batch: int

    @staticmethod
    def prepare(backbone: OpenClip, images: int, points: int, batch: int, device: torch.device) -> PlaneBench:
        torch.manual_seed(0)
        model = backbone.make_model()
        base = {n: t.detach().clone() for n, t in model.state_dict().items()}
        experts = {name: {n: t + make_delta(t) for n, t in base.items()} for name in PAIR}
        side = max(model.size)
        width = model(torch.zeros(1, 3, side, side)).shape[1]
        tasks = {}
        for seed, name in enumerate(PAIR):
            task = NoisePictures(name=name, images=images, side=side, seed=seed)
            objective = ImageObjective(task, torch.randn(CLASSES, width), precision=backbone.precision)
            tasks[name] = Sample(objective.to(device), "validation", torch.arange(images))
        alphas = [-0.5 + 2.0 * i / (points - 1) for i in range(points)]
        return PlaneBench(model.to(device), Weights(model, base, experts), tasks, alphas, batch)

    def measure_rate(self, rounds: int) -> float:
        """Images a second of one model's evaluation, after one to warm up."""
        task = self.tasks[PAIR[0]]
        task.score(self.model, self.batch)
        begun = read_clock()
        for _ in range(rounds):
            task.score(self.model, self.batch)
        return rounds * len(task.index) / (read_clock() - begun)

    def move(self, rounds: int) -> float:
        """Milliseconds to put one model together."""
        self.weights.move(dict.fromkeys(PAIR, 0.5))
        begun = read_clock()
        for _ in range(rounds):
            self.weights.move(dict.fromkeys(PAIR, 0.5))
        return 1e3 * (read_clock() - begun) / rounds

    def measure_rows(self, start: int = 0) -> dict[str, Any]:
        """The plane from row `start` on: seconds in all and a row; in the first is each vector alone."""
        begun = last = read_clock()
        seconds, rows = [], []
        for row in evaluate_plane(
            self.model, self.weights, self.tasks, PAIR, self.alphas, start=start, batch_size=self.batch
        ):
            now = read_clock()
            seconds.append(now - last)
            last = now
            rows.append(row)
        assert all(math.isfinite(v) for row in rows for name in row for v in row[name])
        return {"seconds": round(last - begun, 2), "rows": [round(s, 3) for s in seconds]}


def make_delta(tensor: Tensor) -> Tensor:
    return 1e-3 * torch.randn_like(tensor) if tensor.is_floating_point() else torch.zeros_like(tensor)


def read_clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="the shipped model's shape, 5×5 points, 40 images")
    parser.add_argument("--batch", type=int, default=512)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone = OpenClip("ViT-B-32-quickgelu", None, precision="bfloat16")
    images, points, rounds = 2000, 21, 5
    if args.tiny:
        backbone = replace(backbone, architecture="glyph-clip")
        images, points, rounds = 40, 5, 1
    cells = points * points * len(PAIR)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "date": str(date.today()),
        "architecture": backbone.architecture,
        "points": points,
        "images": images,
        "batch": args.batch,
        "evaluations": cells,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def write(name: str, value: object) -> None:
        results[name] = value
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(value), flush=True)

    begun = read_clock()
    bench = PlaneBench.prepare(backbone, images, points, args.batch, device)
    bench.measure_rate(1)
    write("loading_seconds", round(read_clock() - begun, 1))
    write("images_a_second", {"bfloat16": round(bench.measure_rate(rounds))})
    write("move_ms", round(bench.move(20), 3))
    whole = bench.measure_rows()
    if device.type == "cuda":
        whole["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    whole["median_row"] = statistics.median(whole["rows"])
    write("plane, bfloat16", whole)

    for task in bench.tasks.values():
        task.objective.precision = "float32"
    write("images_a_second", {**results["images_a_second"], "float32": round(bench.measure_rate(1))})
    last = bench.measure_rows(start=points - 1)
    done = 4 * points - 1  # each task alone over the axis, and a row that has one of these in it
    last |= {"evaluations": done, "whole_plane_extrapolated": round(last["seconds"] * cells / done, 1)}
    write("last row, float32", last)


if __name__ == "__main__":
    main()
