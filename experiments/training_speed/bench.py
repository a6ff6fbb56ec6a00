"""How fast experts train: as written, with steps replayed from CUDA graphs, with a compiled model, and both.

    python experiments/training_speed/bench.py --out results.jsonl          # on a GPU, at most 8 minutes
    python experiments/training_speed/bench.py --small --out /tmp/dry.jsonl # tiny, on a CPU: that it runs

Each case is a line of the file; those that are there are left out when the same command runs again. Cases run
in processes by group, and one that fails leaves its error in its line. See README.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from problems import BATCH, PRECISION, make_problem

from mergekit_lab.batches import to_device
from mergekit_lab.optim import SAM, SWA, MergOPT
from mergekit_lab.training import StepBatches, TrainingSettings, finetune

CUDA = torch.cuda.is_available()
ADAMW = partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.1)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": ADAMW,
    "sam": partial(SAM, base=ADAMW),
    "mergopt": partial(MergOPT, base=ADAMW),
    "swa": partial(SWA, base=ADAMW, steps=50, start=0.5),
}
MODES = {
    "eager": {"compile": False, "capture": False},
    "graph": {"compile": False, "capture": True},
    "compile": {"compile": True, "capture": False},
    "both": {"compile": True, "capture": True},
}


@dataclass(frozen=True)
class TimedCase:
    """One line. `steps` are those that are timed; `what` is "speed", "losses", "resume" or "input"."""

    group: str
    what: str
    optimizer: str = "adamw"
    mode: str = "eager"
    steps: int = 50

    @property
    def name(self) -> str:
        return f"{self.group} | {self.what} | {self.optimizer} | {self.mode}"


def list_cases() -> list[TimedCase]:
    """In the order in which they say most, were the time to end."""
    cases = []
    speed = {
        "clip": [
            ("adamw", "eager", 250), ("adamw", "graph", 1500), ("sam", "eager", 120), ("sam", "graph", 800),
            ("mergopt", "eager", 200), ("mergopt", "graph", 1500), ("adamw", "both", 1500),
            ("sam", "both", 800), ("mergopt", "both", 1500), ("adamw", "compile", 200),
        ],
        "vit_b32": [
            ("adamw", "eager", 120), ("adamw", "graph", 200), ("adamw", "both", 300), ("sam", "both", 150),
            ("mergopt", "both", 250), ("adamw", "compile", 150),
        ],
        "vit_l14": [("adamw", "eager", 45), ("adamw", "graph", 45), ("adamw", "both", 60)],
        "smollm2": [
            ("adamw", "eager", 60), ("adamw", "graph", 200), ("mergopt", "graph", 200), ("adamw", "both", 200),
        ],
    }  # fmt: skip
    for group, rows in speed.items():
        for optimizer, mode, steps in rows:
            cases.append(TimedCase(group, "speed", optimizer, mode, steps))
            if group != "vit_l14" or mode != "graph":
                cases.append(TimedCase(group, "losses", optimizer, mode))
        if group == "clip":
            cases += [TimedCase(group, "resume", o, "graph") for o in ("adamw", "sam", "mergopt", "swa")]
            cases.append(TimedCase(group, "resume", "adamw", "both"))
        cases.append(TimedCase(group, "input"))
    return cases


class Pace(Callback):
    """Seconds a step over the last two thirds of a training, and of the whole."""

    def __init__(self, steps: int) -> None:
        self.first = steps // 3
        self.steps = steps
        self.marks: dict[int, float] = {}

    def on_train_start(self, *_: Any) -> None:
        self._mark(0)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in (self.first, self.steps):
            self._mark(trainer.global_step)

    def _mark(self, step: int) -> None:
        if CUDA:
            torch.cuda.synchronize()
        self.marks[step] = time.perf_counter()

    def make_row(self) -> dict[str, float]:
        whole = self.marks[self.steps] - self.marks[0]
        steady = (self.marks[self.steps] - self.marks[self.first]) / (self.steps - self.first)
        return {
            "ms": round(1e3 * steady, 3),
            "steps_per_second": round(1 / steady, 2),
            "whole_s": round(whole, 2),
        }


class LogLines(logging.Handler):
    """What the training says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[:300])


def train(case: TimedCase, small: bool, steps: int, folder: Path, **options: Any) -> Any:
    """Our training loop, as a run calls it."""
    setup = make_problem(case.group, small)
    settings = TrainingSettings(
        steps=steps, batch_size=4 if small else BATCH[case.group], lr=1e-5, weight_decay=0.1, keep="last",
        warmup_steps=steps // 10, validations=1, precision="32-true" if small else PRECISION[case.group],
        **MODES[case.mode],
    )  # fmt: skip
    settings = replace(settings, **options.pop("settings", {}))
    return finetune(
        setup.make_model(), {"task": setup.objective}, OPTIMIZERS[case.optimizer], settings, seed=0,
        resume=folder, trainer={"accelerator": "gpu" if CUDA else "cpu", "devices": 1,
        "enable_progress_bar": False},
        **options,
    )  # fmt: skip


def measure_speed(case: TimedCase, small: bool, folder: Path) -> dict[str, Any]:
    steps = 9 if small else case.steps
    pace = Pace(steps)
    train(case, small, steps, folder, callbacks=[pace])
    peak = {"peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2)} if CUDA else {}
    padded = getattr(make_problem(case.group, small).objective, "padded", (0, 0))
    share = {"places_that_are_tokens": round(padded[0] / padded[1], 3)} if padded[1] else {}
    return pace.make_row() | {"steps": steps} | peak | share


def measure_losses(case: TimedCase, small: bool, folder: Path) -> dict[str, Any]:
    done = train(case, small, 8 if small else 50, folder)
    return {"losses": [round(p["train_loss"], 6) for p in done.curve if "train_loss" in p]}


class Interruption(Exception):
    pass


def measure_resume(case: TimedCase, small: bool, folder: Path) -> dict[str, Any]:
    """Whether a training that was cut gives the bits of one that was not, and another one that was not does."""

    def cut(metrics: dict[str, float], step: int) -> None:
        if step > steps // 2:
            raise Interruption

    steps = 8 if small else 48

    whole, again = (
        train(case, small, steps, folder / name, settings={"validations": 4}) for name in ("whole", "again")
    )
    try:
        train(case, small, steps, folder / "cut", settings={"validations": 4}, on_metrics=cut)
        raise AssertionError("the training was not cut")
    except Interruption:
        pass
    resumed = train(case, small, steps, folder / "cut", settings={"validations": 4})

    def list_differing(other: Any) -> list[str]:
        return [n for n, t in whole.state.items() if not torch.equal(t, other.state[n])]

    return {
        "resumed_differs_in": len(list_differing(resumed)),
        "repeated_differs_in": len(list_differing(again)),
    }


def measure_input(case: TimedCase, small: bool, folder: Path) -> dict[str, Any]:
    """Samples a second that reading and augmenting bring, without training, and what a batch of these takes."""
    setup = make_problem(case.group, small)
    count, size = (3, 4) if small else (60, BATCH[case.group])
    device = torch.device("cuda" if CUDA else "cpu")
    objective = deepcopy(setup.objective).to(device)
    few = setup.objective.fixes_shapes
    batches = iter(StepBatches({"task": objective}, size, count + 5, 0, few_shapes=few, device=device))
    for _ in range(5):
        next(batches)
    wait()
    begun = time.perf_counter()
    for _ in batches:
        pass
    wait()
    brought = size * count / (time.perf_counter() - begun)
    moved = to_device(objective.make_training_batch(torch.arange(size)), device)
    objective.augment(moved, 0)
    wait()
    begun = time.perf_counter()
    for seed in range(20):
        objective.augment(moved, seed)
    wait()
    return {
        "brought_per_second": round(brought),
        "augment_ms": round(1e3 * (time.perf_counter() - begun) / 20, 3),
    }


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


MEASURES = {
    "speed": measure_speed, "losses": measure_losses, "resume": measure_resume, "input": measure_input,
}  # fmt: skip


def run_cases(cases: list[TimedCase], small: bool, out: Path) -> None:
    """In this process; a line for each."""
    lines = LogLines()
    logging.getLogger("mergekit_lab").addHandler(lines)
    logging.getLogger("mergekit_lab").setLevel(logging.INFO)
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for case in cases:
        lines.lines.clear()
        print(case.name, flush=True)
        begun = time.perf_counter()
        write(out, {"name": case.name, "begun": True})
        row: dict[str, Any] = {"name": case.name}
        try:
            if CUDA:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            with tempfile.TemporaryDirectory() as folder:
                row |= MEASURES[case.what](case, small, Path(folder))
        except Exception:
            row["error"] = traceback.format_exc()[-3000:]
        row |= {"took_s": round(time.perf_counter() - begun, 1), "log": list(lines.lines)}
        write(out, row)
        print(json.dumps({k: v for k, v in row.items() if k not in ("losses", "log")})[:1500], flush=True)
        if "error" in row and "CUDA error" in row["error"]:
            raise SystemExit(3)  # nothing more can be measured in this process


def write(out: Path, row: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(out: Path) -> Iterator[dict[str, Any]]:
    if out.exists():
        yield from map(json.loads, out.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("OUT", ".")) / "training_speed.jsonl"
    parser.add_argument("--out", type=Path, default=default, help="lines of JSON, which are added to")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="no case begins later")
    parser.add_argument("--only", nargs="+", default=[], help="words that a case's name must have")
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = [case for case in list_cases() if all(word in case.name for word in options.only)]
    if options.cases:
        run_cases([case for case in wanted if case.name in options.cases], options.small, options.out)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(options.out, {
        "command": " ".join(sys.argv), "card": torch.cuda.get_device_name() if CUDA else "cpu",
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(),
    })  # fmt: skip
    ends = time.monotonic() + 60 * options.minutes
    for group in dict.fromkeys(case.group for case in wanted):
        while time.monotonic() < ends:
            begun = {row["name"] for row in read(options.out) if row.get("begun")}
            left = [case.name for case in wanted if case.group == group and case.name not in begun]
            if not left:
                break
            command = [sys.executable, __file__, "--out", str(options.out), "--cases", *left]
            try:
                subprocess.run(
                    [*command, *(["--small"] if options.small else [])], timeout=ends - time.monotonic()
                )
            except subprocess.TimeoutExpired:
                print("the time is over", flush=True)
    show(options.out)


def show(out: Path) -> None:
    """A table of what was measured, and how far losses lie from those of eager steps."""
    rows = {row["name"]: row for row in read(out) if "name" in row and not row.get("begun")}
    for name, row in rows.items():
        group, what, optimizer, _ = name.split(" | ")
        note = row.get("error", "").strip().splitlines()[-1:]
        if what == "speed" and "ms" in row:
            eager = rows.get(f"{group} | speed | {optimizer} | eager") or rows.get(
                f"{group} | speed | adamw | eager"
            )
            gain = f"{eager['ms'] / row['ms']:5.2f}x" if eager and "ms" in eager else ""
            note = [f"{row['ms']:9.3f} ms {row['steps_per_second']:8.2f}/s {gain} whole {row['whole_s']} s"]
        elif what == "losses" and "losses" in row:
            other = rows.get(f"{group} | losses | {optimizer} | eager", {}).get("losses")
            if other and len(other) == len(row["losses"]):
                gap = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], other, strict=True))
                note = [f"largest relative gap to eager {gap:.1e}"]
        elif what in ("resume", "input") and not note:
            note = [json.dumps({k: v for k, v in row.items() if k not in ("name", "log", "took_s")})]
        print(f"{name:42s} {' '.join(note)}")


if __name__ == "__main__":
    main()
