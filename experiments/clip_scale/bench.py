"""How fast CLIP ViT-B/32 evaluates and trains from decoded images, and what a whole run costs at full size.

    python experiments/clip_scale/bench.py --out results.json                        # one GPU: nine minutes
    python experiments/clip_scale/bench.py --out results.json --parts training run   # these alone
    python experiments/clip_scale/bench.py --out results.json --tiny                 # that it runs, on any CPU

Results are written after every part, beside those that the file holds; a run that was cut is found in the store
and goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from mergekit_lab.backbones import ImageObjective, OpenClip
from mergekit_lab.backbones.classification import Crops
from mergekit_lab.batches import pin_memory, to_device
from mergekit_lab.evaluation import score
from mergekit_lab.tasks import ImageSamples, ImageTask, Part
from mergekit_lab.tasks.decoding import Pictures, map_file
from mergekit_lab.training import StepBatches, TrainingCost, TrainingSettings, finetune

CLASSES = 10
PARTS = ("evaluation", "replaying", "training", "run")


@dataclass(frozen=True, eq=False)
class NoiseFiles(ImageTask):
    """Random bytes in the files that decoding leaves: squares for evaluation, pictures for training."""

    folder: Path = Path()
    images: int = 0
    pictures: int = 0
    side: int = 224

    classes = tuple(map(str, range(CLASSES)))
    templates = ("{}",)

    def make(self, part: Part) -> ImageSamples:
        if part == "train":
            rng = np.random.default_rng(0)
            sizes = np.stack([np.full(self.pictures, 256), rng.integers(256, 400, self.pictures)], 1)
            sizes = rng.permuted(sizes, axis=1)
            data = Pictures(self.map_bytes("pictures", int(3 * sizes.prod(1).sum())), sizes, self.side)
            return ImageSamples(data, torch.arange(self.pictures) % CLASSES)
        shape = (self.images, 3, self.side, self.side)
        return ImageSamples(
            self.map_bytes("images", int(np.prod(shape))).view(shape), torch.arange(self.images) % CLASSES
        )

    def map_bytes(self, name: str, size: int) -> torch.Tensor:
        file = self.folder / f"{name}-{size}.u8"
        if not file.exists():
            block = np.random.default_rng(1).integers(0, 256, 1 << 26, np.uint8).tobytes()
            with file.open("wb") as out:
                for start in range(0, size, len(block)):
                    out.write(block[: min(len(block), size - start)])
        return map_file(file)


def read_clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def make_objective(
    backbone: OpenClip,
    task: NoiseFiles,
    device: torch.device,
    precision: str,
    objective_class: type[ImageObjective] = ImageObjective,
) -> ImageObjective:
    width = backbone.make_model()(torch.zeros(1, 3, task.side, task.side)).shape[1]
    head = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(0))
    return objective_class(task, head, Crops((0.9, 1.0), False, task.side), precision).to(device)


def measure_evaluation(
    backbone: OpenClip, task: NoiseFiles, device: torch.device, batch: int
) -> dict[str, Any]:
    """Images a second: the forward pass alone and compiled, from files, from images on the device."""
    report: dict[str, Any] = {"images": task.images, "batch": batch}
    for precision in ("bfloat16", "float32"):
        objective = make_objective(backbone, task, device, precision)
        model = backbone.make_model().to(device)
        some = task.load_samples("test").images[:batch].to(device)
        rates = {"forward": [], "test part, from files": [], "validation part, resident": []}
        with torch.inference_mode():
            for _ in range(3):
                objective._compute_logits(model, some)
            for _ in range(3 if precision == "bfloat16" else 1):
                rounds = max(1, task.images // batch)
                begun = read_clock()
                for _ in range(rounds):
                    objective._compute_logits(model, some).argmax(1)
                rates["forward"].append(rounds * batch / (read_clock() - begun))
                for part, name in (
                    ("test", "test part, from files"),
                    ("validation", "validation part, resident"),
                ):
                    begun = read_clock()
                    score(model, objective, part, batch_size=batch)  # type: ignore[arg-type]
                    rates[name].append(task.images / (read_clock() - begun))
        report[precision] = {name: [round(rate) for rate in values] for name, values in rates.items()}
        report[precision] |= measure_compiled(objective, model, some, task.images // batch)
    return report


@torch.inference_mode()
def measure_compiled(objective: ImageObjective, model: nn.Module, some: Tensor, rounds: int) -> dict[str, Any]:
    """The forward pass of a compiled model, alone and replayed from a CUDA graph."""
    report: dict[str, Any] = {}
    for name, options in {"compiled": {}, "compiled and replayed": {"triton.cudagraphs": True}}.items():
        begun = read_clock()
        compiled = torch.compile(model, options=options)
        for _ in range(3):
            objective._compute_logits(compiled, some)
        report[f"{name}, s to compile"] = round(read_clock() - begun, 1)
        rates = []
        for _ in range(3):
            begun = read_clock()
            for _ in range(max(1, rounds)):
                objective._compute_logits(compiled, some).argmax(1)
            rates.append(round(max(1, rounds) * len(some) / (read_clock() - begun)))
        report[f"forward, {name}"] = rates
    return report


def measure_replay(device: torch.device, folder: Path, images: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of an evaluation of the shipped model's size, its forward passes as written and replayed."""
    backbone, task = OpenClip("glyph-clip", None), NoiseFiles("noise", folder=folder, images=images, side=32)
    model = backbone.make_model().to(device)
    report: dict[str, Any] = {"images": images}
    for name, replays in {"as written": False, "replayed": True}.items():
        objective = make_objective(backbone, task, device, "float32")
        objective.replays_forward = replays  # type: ignore[misc]
        times = []
        for _ in range(rounds):
            begun = read_clock()
            score(model, objective, "validation", batch_size=512)
            times.append(read_clock() - begun)
        report[f"{name}, ms"] = round(1e3 * statistics.median(times[3:]), 2)
    return report


class _Again(ImageObjective):
    """Gives the first batch that was asked for again and again: training without reading."""

    _held: Any = None

    def make_training_batch(self, index: torch.Tensor) -> Any:
        if self._held is None:
            self._held = super().make_training_batch(index)
            if torch.cuda.is_available():
                self._held = pin_memory(self._held)
        return self._held


class _Steps(Callback):
    """When steps began, and how long each waited for its batch."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.ended: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun.append(time.perf_counter())

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended.append(time.perf_counter())

    def summarize(self) -> dict[str, float]:
        """Of the last two thirds of the steps, each from its beginning to the next one's; nothing after the
        last step is in it."""
        first = len(self.begun) // 3
        each = np.diff(self.begun[first:])
        waits = [
            begun - ended for begun, ended in zip(self.begun[first:], self.ended[first - 1 :], strict=False)
        ]
        return {
            "steps_per_second, median": round(1 / statistics.median(each), 2),
            "steps_per_second, mean": round(len(each) / float(each.sum()), 2),
            "between steps, ms": round(1e3 * statistics.median(waits), 2),
        }


def measure_training(
    backbone: OpenClip, task: NoiseFiles, steps: int, batch: int, precision: str
) -> dict[str, Any]:
    """Batches a second that are read and nothing else; steps a second with them, and with one batch again."""
    report: dict[str, Any] = {
        "steps": steps,
        "batch": batch,
        "pictures": task.pictures,
        "cores": len(os.sched_getaffinity(0)),
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    objective = make_objective(backbone, task, torch.device("cpu"), "bfloat16")
    for name in ("first time", "second time"):
        batches = StepBatches({"noise": objective}, batch, steps, seed=0)
        begun = time.perf_counter()
        count = sum(len(labels) for micro_batches in batches for _, labels in micro_batches.values())
        report[f"reading alone, images a second, {name}"] = round(count / (time.perf_counter() - begun))
    training_batch = to_device(objective.make_training_batch(torch.arange(batch)), device)
    crops = []
    for seed in range(10):
        begun = read_clock()
        objective.augment(training_batch, seed)
        crops.append(read_clock() - begun)
    report["crop, resize and flip on the device, ms a batch"] = round(1e3 * statistics.median(crops), 2)
    del training_batch
    for name, objective_class in {"one batch again": _Again, "from files": ImageObjective}.items():
        own = make_objective(backbone, task, torch.device("cpu"), "bfloat16", objective_class)
        cost, timer = TrainingCost(), _Steps()
        settings = TrainingSettings(
            steps=steps, batch_size=batch, lr=1e-5, weight_decay=0.1, precision=precision, validations=1,
            keep="last",
        )  # fmt: skip
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            finetune(
                backbone.make_model(), {"noise": own}, partial(torch.optim.AdamW, lr=1e-5, fused=True),
                settings, seed=0, resume=Path(folder), callbacks=[cost, timer], trainer={"accelerator": "auto",
                "devices": 1, "enable_progress_bar": False},
            )  # fmt: skip
        whole = time.perf_counter() - begun
        report[name] = timer.summarize() | cost.measured | {
            "seconds before the first step": round(timer.begun[0] - begun, 2),
            "seconds of steps": round(timer.ended[-1] - timer.begun[0], 2),
            "seconds after the last step": round(begun + whole - timer.ended[-1], 2),
        }  # fmt: skip
    return report


def measure_run(arguments: list[str], store: Path, folder: Path, limit: float) -> dict[str, Any]:
    """`vit_b32_saft` with random weights on the shipped tasks; what it left in the store."""
    command = [sys.executable, "-m", "mergekit_lab", "+experiment=vit_b32_saft", *arguments]
    command += [f"store.root={store}", f"run_dir={folder}"]
    begun = time.monotonic()
    try:
        code: int | str = subprocess.run(command, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        code = "cut"
    report: dict[str, Any] = {
        "command": " ".join(["python", *command[1:-2]]),
        "exit": code,
        "seconds": round(time.monotonic() - begun, 1),
    }
    if (folder / "timings.json").exists():
        report["stages"] = json.loads((folder / "timings.json").read_text())
    for kind in ("experts", "heads", "fishers", "searches", "merged", "evaluations"):
        manifests = [json.loads(file.read_text()) for file in sorted(store.glob(f"{kind}/*/manifest.json"))]
        kept = ("wall_seconds", "steps_per_second", "gigabytes", "method", "peak_memory_bytes", "samples")
        rows = []
        for manifest in sorted(manifests, key=lambda each: each["created"]):
            row = {name: manifest["info"][name] for name in kept if name in manifest["info"]}
            rows.append({"task": manifest["content"]["task"]} | row if "task" in manifest["content"] else row)
        report[kind] = rows
    walls = [row["wall_seconds"] for row in report.pop("evaluations")]
    report["evaluations"] = {"count": len(walls), "seconds": round(sum(walls), 1)}
    return report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()) / "clip_scale")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--limit", type=float, default=400, help="seconds for the whole run")
    parser.add_argument("--overrides", nargs="+", default=[], help="further settings of the whole run")
    parser.add_argument("--name", default="run", help="of the whole run's results, and of its store")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    where = {
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }

    def keep(name: str, value: dict[str, Any]) -> None:
        results[name] = where | value
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(value)[:4000], flush=True)

    backbone = OpenClip("ViT-B-32-quickgelu", None)
    task = NoiseFiles("noise", folder=options.store / "noise", images=20_480, pictures=4_000)
    sizes = (512, 150, 128, "bf16-mixed")
    arguments = ["backbone.weights=null", "suite=glyphs8", "training.steps=200", "training.warmup_steps=50"]
    arguments += ["training.validations=1", "curvature.samples=64", "progress=false"]
    if options.tiny:
        backbone, task = OpenClip("glyph-clip", None), replace(task, images=96, pictures=40, side=32)
        sizes = (32, 8, 4, "32-true")
        arguments += ["backbone=glyph_clip", "suite=glyphs4", "training.steps=2", "training.warmup_steps=1"]
        arguments += ["training.batch_size=4", "training.precision=32-true", "curvature.samples=8"]
    (options.store / "noise").mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if cuda else "cpu")
    if "evaluation" in options.parts:
        keep("evaluation", measure_evaluation(backbone, task, device, sizes[0]))
    if "replaying" in options.parts:
        images, rounds = (64, 5) if options.tiny else (1024, 60)
        keep("replaying", measure_replay(device, options.store / "noise", images, rounds))
    if "training" in options.parts:
        keep("training", measure_training(backbone, replace(task, images=sizes[0]), *sizes[1:]))
    if "run" in options.parts:
        store, folder = options.store / f"store_{options.name}", options.out.parent / options.name
        keep(options.name, measure_run([*arguments, *options.overrides], store, folder, options.limit))


if __name__ == "__main__":
    main()
