"""SIGKILL at random moments of a run, then the run again: are records and bits the same?

    python experiments/faults/kill.py --kills 20 --out experiments/faults/results.json

A tiny quickstart (two tasks, seven mergers, the joint model) is run once undisturbed. Then, for every kill, a
fresh store: the run is killed at a moment drawn from its whole length, and started again until it ends (once,
unless `--twice`, which kills the second one too). Runs are forks of one process that has imported everything,
so that kills fall into work and not into imports.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from composing import TINY, composed

from mergekit_lab.programs import start


def _child(folder: Path, store: Path, more: list[str]) -> None:
    cfg, choices = composed([*TINY, "training.validations=4", f"store.root={store}", *more])
    start(cfg, folder, choices, [])


def _start(work: Callable[[], None], told: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with told.open("a") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        torch.set_num_threads(1)
        work()
        code = 0
    finally:
        os._exit(code)


def _weights(store: Path) -> dict[str, str]:
    """SHA-256 of all published files but those that hold times."""
    found = {}
    for file in sorted(store.glob("*/*/*")):
        if file.suffix == ".safetensors" and file.parts[-3] not in ("work", "locks"):
            found[str(file.relative_to(store))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _records(folder: Path) -> list[tuple[str, str, float, str, str]]:
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [(r["kind"], r["task"], r["value"], r["model_key"], r["evaluation_key"]) for r in rows]


def _doing(store: Path) -> list[str]:
    """What was in the making when it was killed."""
    return sorted(f"{p.parent.name}" for p in store.glob("work/*/*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--place", type=Path, default=Path("/tmp/kill"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    shutil.rmtree(given.place, ignore_errors=True)
    given.place.mkdir(parents=True)
    whole = given.place / "whole"

    def work(name: str) -> Callable[[], None]:
        return lambda: _child(given.place / name / "run", given.place / name / "store", given.overrides)

    begun = time.monotonic()
    (given.place / "whole").mkdir()
    assert os.waitpid(_start(work("whole"), whole / "told"), 0)[1] == 0, (whole / "told").read_text()[-2000:]
    length = time.monotonic() - begun
    weights, records = _weights(whole / "store"), _records(whole / "run")
    print(f"undisturbed: {length:.1f} s, {len(weights)} files, {len(records)} records", flush=True)
    moments, rows = random.Random(given.seed), []
    for number in range(given.kills):
        name = f"kill{number}"
        place = given.place / name
        place.mkdir()
        row = {"kills": [], "in the making": []}
        for _ in range(2 if given.twice else 1):
            after = moments.uniform(0, length)
            pid = _start(work(name), place / "told")
            time.sleep(after)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            row["kills"].append(round(after, 2))
            row["in the making"].append(_doing(place / "store"))
        begun = time.monotonic()
        status = os.waitpid(_start(work(name), place / "told"), 0)[1]
        row |= {
            "finished": status == 0,
            "seconds": round(time.monotonic() - begun, 1),
            "resumed": (place / "told").read_text().count("resuming from"),
            "same records": status == 0 and _records(place / "run") == records,
            "same bits": _weights(place / "store") == weights,
            "left over": _doing(place / "store") + [p.name for p in (place / "store/locks").iterdir()],
        }
        print(row, flush=True)
        rows.append(row)
        report = {
            "date": str(date.today()),
            "command": f"python experiments/faults/kill.py {' '.join(sys.argv[1:])}",
            "undisturbed_seconds": round(length, 1),
            "files": len(weights),
            "records": len(records),
            "torch": torch.__version__,
            "rows": rows,
        }
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        if row["same bits"]:
            shutil.rmtree(place)
    good = sum(r["finished"] and r["same records"] and r["same bits"] and not r["left over"] for r in rows)
    print(f"{good} of {len(rows)} as undisturbed")


if __name__ == "__main__":
    main()
