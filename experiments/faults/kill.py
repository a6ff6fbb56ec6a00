"""SIGKILL at random moments of a run, then the run again: are records and bits the same?

    python experiments/faults/kill.py --kills 20 --out experiments/faults/results.json

A tiny quickstart (two tasks, seven mergers, the joint model) is run once undisturbed. Then, for every kill, a
fresh store: the run is killed at a moment drawn from its whole length, and started again until it ends (once,
unless `--twice`, which kills the second one too). Runs are forks of one process that has imported everything,
so that kills fall into work and not into imports.
"""

import argparse
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import describe_call, hash_weights, list_half_made, read_rows, run_once, start
from composing import TINY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/kill"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    whole = options.folder / "whole"

    def work(name: str) -> Callable[[], None]:
        overrides = [*TINY, "training.validations=4", *options.overrides]
        return lambda: run_once(options.folder / name / "run", options.folder / name / "store", overrides)

    begun = time.monotonic()
    (options.folder / "whole").mkdir()
    assert os.waitpid(start(work("whole"), whole / "log"), 0)[1] == 0, (whole / "log").read_text()[-2000:]
    length = time.monotonic() - begun
    weights, records = hash_weights(whole / "store"), read_rows(whole / "run")
    print(f"undisturbed: {length:.1f} s, {len(weights)} files, {len(records)} records", flush=True)
    moments, rows = random.Random(options.seed), []
    for number in range(options.kills):
        name = f"kill{number}"
        folder = options.folder / name
        folder.mkdir()
        row = {"kills": [], "in the making": []}
        for _ in range(2 if options.twice else 1):
            after = moments.uniform(0, length)
            pid = start(work(name), folder / "log")
            time.sleep(after)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            row["kills"].append(round(after, 2))
            row["in the making"].append(list_half_made(folder / "store"))
        begun = time.monotonic()
        status = os.waitpid(start(work(name), folder / "log"), 0)[1]
        row |= {
            "finished": status == 0,
            "seconds": round(time.monotonic() - begun, 1),
            "resumed": (folder / "log").read_text().count("resuming from"),
            "same records": status == 0 and read_rows(folder / "run") == records,
            "same bits": hash_weights(folder / "store") == weights,
            "left over": list_half_made(folder / "store")
            + [p.name for p in (folder / "store/locks").iterdir()],
        }
        print(row, flush=True)
        rows.append(row)
        report = describe_call() | {
            "undisturbed_seconds": round(length, 1),
            "files": len(weights),
            "records": len(records),
            "torch": torch.__version__,
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        if row["same bits"]:
            shutil.rmtree(folder)
    good = sum(r["finished"] and r["same records"] and r["same bits"] and not r["left over"] for r in rows)
    print(f"{good} of {len(rows)} as undisturbed")


if __name__ == "__main__":
    main()
