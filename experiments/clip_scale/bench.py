"""How fast CLIP ViT-B/32 evaluates and trains from decoded images, and what a whole run costs at full size.

    python experiments/clip_scale/bench.py --out results.json            # one GPU: four minutes
    python experiments/clip_scale/bench.py --out results.json --tiny     # any CPU, in small, to see that it
    runs

Results are written after every part; a run that was cut is found in the store and goes on.
"""

from __future__ import annotations

import argparse
import json
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

from mergekit_lab.backbones import ImageObjective, OpenClip
from mergekit_lab.backbones.classification import Crops
from mergekit_lab.backbones.objective import pinned
from mergekit_lab.evaluation import score
from mergekit_lab.tasks import ImageTask, Part, Split
from mergekit_lab.tasks.decoding import Pictures, mapped
from mergekit_lab.training import Settings, StepBatches, TrainingCost, finetune

CLASSES = 10


@dataclass(frozen=True, eq=False)
class Noise(ImageTask):
    """Random bytes in the files that decoding leaves: squares for evaluation, pictures for training."""

    folder: Path = Path()
    images: int = 0
    pictures: int = 0
    side: int = 224

    classes = tuple(map(str, range(CLASSES)))
    templates = ("{}",)

    def make(self, part: Part) -> Split:
        if part == "train":
            rng = np.random.default_rng(0)
            sizes = np.stack([np.full(self.pictures, 256), rng.integers(256, 400, self.pictures)], 1)
            data = Pictures(self._bytes("pictures.u8", int(3 * sizes.prod(1).sum())), sizes, self.side)
            return Split(data, torch.arange(self.pictures) % CLASSES)
        shape = (self.images, 3, self.side, self.side)
        return Split(
            self._bytes("images.u8", int(np.prod(shape))).view(shape), torch.arange(self.images) % CLASSES
        )

    def _bytes(self, name: str, size: int) -> torch.Tensor:
        file = self.folder / name
        if not file.exists():
            block = np.random.default_rng(1).integers(0, 256, 1 << 26, np.uint8).tobytes()
            with file.open("wb") as out:
                for start in range(0, size, len(block)):
                    out.write(block[: min(len(block), size - start)])
        return mapped(file)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _objective(backbone: OpenClip, task: Noise, device: torch.device, precision: str) -> ImageObjective:
    width = backbone.model()(torch.zeros(1, 3, task.side, task.side)).shape[1]
    head = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(0))
    return ImageObjective(task, head, Crops((0.9, 1.0), False, task.side), precision).to(device)


def evaluation(backbone: OpenClip, task: Noise, device: torch.device, batch: int) -> dict[str, Any]:
    """Images a second: the forward pass alone, from the files, and from images held on the device."""
    found: dict[str, Any] = {"images": task.images, "batch": batch}
    for precision in ("bfloat16", "float32"):
        objective = _objective(backbone, task, device, precision)
        model = backbone.model().to(device)
        some = task.split("test").images[:batch].to(device)
        rates = {"forward": [], "test part, from files": [], "validation part, resident": []}
        with torch.inference_mode():
            for _ in range(3):
                objective._logits(model, some)
            for _ in range(3 if precision == "bfloat16" else 1):
                rounds = max(1, task.images // batch)
                begun = _now()
                for _ in range(rounds):
                    objective._logits(model, some).argmax(1)
                rates["forward"].append(rounds * batch / (_now() - begun))
                for part, name in (
                    ("test", "test part, from files"),
                    ("validation", "validation part, resident"),
                ):
                    begun = _now()
                    score(model, objective, part, batch_size=batch)  # type: ignore[arg-type]
                    rates[name].append(task.images / (_now() - begun))
        found[precision] = {name: [round(rate) for rate in values] for name, values in rates.items()}
    return found


def training(backbone: OpenClip, task: Noise, steps: int, batch: int, precision: str) -> dict[str, Any]:
    """Steps a second with batches from the files, and with one batch that is given again and again."""
    found: dict[str, Any] = {"steps": steps, "batch": batch, "pictures": task.pictures}
    settings = Settings(
        steps=steps,
        batch_size=batch,
        lr=1e-5,
        weight_decay=0.1,
        precision=precision,
        validations=1,
        keep="last",
    )
    own = StepBatches.batch
    for name in ("from files", "one batch again"):
        objective = _objective(backbone, task, torch.device("cpu"), "bfloat16")
        if name == "one batch again":
            held = own(StepBatches({"noise": objective}, batch, 1, 0), 0)
            held = {n: pinned(part) for n, part in held.items()} if torch.cuda.is_available() else held
            StepBatches._pinned = lambda self, step, held=held: dict(held)  # type: ignore[method-assign]
        cost = TrainingCost()
        with tempfile.TemporaryDirectory() as folder:
            finetune(
                backbone.model(), {"noise": objective}, partial(torch.optim.AdamW, lr=1e-5), settings, seed=0,
                resume=Path(folder), callbacks=[cost], trainer={"accelerator": "auto", "devices": 1,
                "enable_progress_bar": False},
            )  # fmt: skip
        found[name] = cost.measured
    return found


def whole_run(arguments: list[str], store: Path, folder: Path, limit: float) -> dict[str, Any]:
    """`vit_b32_saft` with random weights on the shipped tasks; what it left in the store."""
    command = [sys.executable, "-m", "mergekit_lab", "+experiment=vit_b32_saft", *arguments]
    command += [f"store.root={store}", f"run_dir={folder}"]
    begun = time.monotonic()
    try:
        code: int | str = subprocess.run(command, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        code = "cut"
    found: dict[str, Any] = {
        "command": command[1:],
        "exit": code,
        "seconds": round(time.monotonic() - begun, 1),
    }
    if (folder / "timings.json").exists():
        found["stages"] = json.loads((folder / "timings.json").read_text())
    for kind in ("experts", "fishers", "searches", "merged", "evaluations"):
        infos = [json.loads(f.read_text())["info"] for f in sorted(store.glob(f"{kind}/*/manifest.json"))]
        kept = ("wall_seconds", "steps_per_second", "gigabytes", "method", "peak_memory_bytes", "samples")
        found[kind] = [{name: info[name] for name in kept if name in info} for info in infos]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()) / "clip_scale")
    parser.add_argument("--limit", type=float, default=185, help="seconds for the whole run")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    results: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    if options.out.exists():
        results = json.loads(options.out.read_text())

    def keep(name: str, value: Any) -> None:
        results[name] = value
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(value)[:2000], flush=True)

    backbone = OpenClip("ViT-B-32-quickgelu", None)
    task = Noise("noise", folder=options.store / "noise", images=20_480, pictures=3_000)
    sizes = (512, 60, 128, "bf16-mixed")
    arguments = ["backbone.weights=null", "suite=glyphs8", "training.steps=200", "training.warmup_steps=50"]
    arguments += ["training.validations=1", "curvature.samples=64", "progress=false"]
    if options.tiny:
        backbone, task = OpenClip("glyph-clip", None), replace(task, images=96, pictures=40, side=32)
        sizes = (32, 8, 4, "32-true")
        arguments += [
            "backbone=glyph_clip",
            "training.steps=2",
            "training.warmup_steps=1",
            "training.batch_size=4",
        ]
        arguments += ["training.precision=32-true", "curvature.samples=8", "suite=glyphs4"]
    (options.store / "noise").mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if cuda else "cpu")
    if "evaluation" not in results:
        keep("evaluation", evaluation(backbone, task, device, sizes[0]))
    if "training" not in results:
        keep("training", training(backbone, task, *sizes[1:]))
    keep("run", whole_run(arguments, options.store / "store", options.out.parent / "run", options.limit))


if __name__ == "__main__":
    main()
