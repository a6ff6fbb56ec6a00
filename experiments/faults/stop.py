"""SIGTERM and SIGINT in the middle of a run: how long until it has ended, and does the next one go on?

    python experiments/faults/stop.py --times 5 --out experiments/faults/stop.json

Runs are those of the command line, on two tasks. Each is told to stop a moment (drawn from the first two
seconds) after it is seen at work: a training by its curve, a search of a coefficient, a merge or an evaluation
by what is in the making in the store. Then the same command is started again and has to finish.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from composing import TINY

LARGE = ["suite.tasks.latin.validation_size=1040", "suite.tasks.latin.test_size=2080"]
"""Enough that an evaluation takes seconds."""
SHARED = [*TINY, *LARGE, "joint=false"]
PHASES = {
    "training": ("experts", ["stage=finetune", "training.steps=60", "training.validations=3"]),
    "search": ("searches", ["stage=merge", "merger=task_arithmetic", "search.prune=false"]),
    "merge": ("merged", ["stage=merge", "merger=wudi", "merger.coefficient=1.0", "merger.steps=1000"]),
    "evaluation": ("evaluations", ["stage=evaluate", "merger=average"]),
    "sweep": (
        "experts",
        [
            "-m",
            "hydra/launcher=local",
            "hydra.launcher.devices=[cpu,cpu]",
            "seed=0,1",
            "merger=average",
            "training.steps=60",
            "training.validations=3",
        ],
    ),
}
"""The kind of artifact that is in the making, and what the run is asked for."""


def start(store: Path, folder: Path, *more: str) -> subprocess.Popen:
    folder.mkdir(parents=True, exist_ok=True)
    flags = [each for each in more if each.startswith("-")]
    arguments = [
        *SHARED,
        f"store.root={store}",
        f"run_dir={folder}",
        *(each for each in more if each not in flags),
    ]
    command = [sys.executable, "-m", "mergekit_lab", *flags, *arguments]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def wait_for(run: subprocess.Popen, folder: Path) -> None:
    if run.wait():
        raise RuntimeError((folder / "log").read_text()[-2000:])


@contextmanager
def keep_busy(processes: int) -> Iterator[None]:
    """So many processes that compute without end beside the run."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()


def try_once(folder: Path, prepared: Path, phase: str, number: signal.Signals, after: float, load: int) -> dict:
    kind, asked = PHASES[phase]
    store, run_folder = folder / "store", folder / "run"
    trains = phase in ("training", "sweep")
    if not trains:
        shutil.copytree(prepared, store)
    run = start(store, run_folder, *asked)
    while not (any(run_folder.rglob("metrics.csv")) if trains else any(store.glob(f"work/{kind}/*"))):
        if run.poll() is not None:
            raise RuntimeError((run_folder / "log").read_text()[-2000:])
        time.sleep(0.01)
    with keep_busy(load):
        time.sleep(after)
        count = len(list(store.glob(f"{kind}/*")))
        begun = time.monotonic()
        run.send_signal(number)
        code = run.wait()
        seconds = time.monotonic() - begun
    row = {
        "phase": phase,
        "signal": number.name,
        "seconds": round(seconds, 2),
        "exit code": code,
        "made before": count,
        "checkpoint": bool(list(store.glob("work/experts/*/resume/last.ckpt"))),
        "locks left": len(list(store.glob("locks/*"))),
    }
    wait_for(start(store, run_folder, *asked), run_folder)
    row["resumed"] = "resuming from" in (run_folder / "log").read_text()
    row["left over"] = len(list(store.glob("work/*/*"))) + len(list(store.glob("locks/*")))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument(
        "--load", type=int, default=0, help="processes that compute beside the run that is told to stop"
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/stop"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # where a shell has it ignored, runs would ignore it too
    shutil.rmtree(options.folder, ignore_errors=True)
    prepared = options.folder / "prepared"
    ready = ["stage=[finetune,merge]", "merger=average"]
    wait_for(start(prepared, options.folder / "first", *ready), options.folder / "first")
    moments, rows = random.Random(options.seed), []
    for phase in options.phases:
        for number in (signal.SIGTERM, signal.SIGINT):
            for turn in range(options.times):
                folder = options.folder / f"{phase}-{number.name}-{turn}"
                rows.append(try_once(folder, prepared, phase, number, moments.uniform(0, 2), options.load))
                print(rows[-1], flush=True)
                shutil.rmtree(folder)
                report = {
                    "date": str(date.today()),
                    "command": f"python experiments/faults/stop.py {' '.join(sys.argv[1:])}",
                    "torch": torch.__version__,
                    "cores": os.cpu_count(),
                    "load": options.load,
                    "rows": rows,
                }
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    for phase in options.phases:
        mine = sorted(row["seconds"] for row in rows if row["phase"] == phase)
        print(f"{phase}: {len(mine)} times, median {mine[len(mine) // 2]} s, longest {mine[-1]} s")


if __name__ == "__main__":
    main()
