"""Runs as forks of one process that has imported everything, and what they leave."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from composing import compose_config

from mergekit_lab import programs


def run_once(folder: Path, store: Path | None, overrides: list[str]) -> None:
    """One run, as the command line would begin it; commands on checkpoints have no store."""
    cfg, choices = compose_config([*overrides, *([] if store is None else [f"store.root={store}"])])
    programs.start(cfg, folder, choices, [])


def start(work: Callable[[], None], log: Path) -> int:
    """The number of a process that does this work and ends with 0, or 1 if it raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with log.open("a") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        torch.set_num_threads(1)
        work()
        code = 0
    finally:
        os._exit(code)


def finish(pid: int, seconds: float) -> int | None:
    """The exit code of a process; None if it hung, and was killed.

    It hangs when it has computed for so long, or waited for so long without computing; waiting for a busy
    machine's processor is neither.
    """
    computed, since = 0.0, time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if ticks != computed or fields[0] == "R":
            computed, since = ticks, time.monotonic()
        if computed > seconds or time.monotonic() - since > seconds:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.05)


def hash_weights(store: Path) -> dict[str, str]:
    """SHA-256 of all published files but those that hold times."""
    hashes = {}
    for file in sorted(store.glob("*/*/*.safetensors")):
        if file.parts[-3] not in ("work", "locks") and file.is_file():
            hashes[str(file.relative_to(store))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return hashes


def read_rows(folder: Path) -> list[tuple[str, str, float, str, str]]:
    """What a run's records say, without times."""
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [(r["kind"], r["task"], r["value"], r["model_key"], r["evaluation_key"]) for r in rows]


def list_half_made(store: Path) -> list[str]:
    """Kinds of what is in the making."""
    return sorted(path.parent.name for path in store.glob("work/*/*"))


def describe_call() -> dict[str, str]:
    """When a script was called, and how."""
    script, *arguments = sys.argv
    command = " ".join(["python", f"experiments/faults/{Path(script).name}", *arguments])
    return {"date": str(date.today()), "command": command}
