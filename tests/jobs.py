"""What workers do in tests/test_workers.py; importable by name in a fresh process."""

import os
import signal
import time
from pathlib import Path

import torch

from mergekit_lab import InputError


def work(what: str, folder: str) -> str:
    if what == "wrong":
        raise InputError("rho must be positive")
    if what == "broken":
        raise ValueError("a bug")
    tries = Path(folder, what)
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    if what == "dies" or (what == "dies once" and tries.read_text() == "x"):
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{what} {os.environ.get('CUDA_VISIBLE_DEVICES')} {torch.get_num_threads()}"


def rank(failing: int | None) -> tuple[str, ...]:
    if os.environ["RANK"] == str(failing):
        raise InputError("this rank has a mistake")
    if failing is not None:
        time.sleep(60)
    return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"))


def work_long(folder: str) -> None:
    """Say who works, and work for a long time."""
    Path(folder, "worker").write_text(str(os.getpid()))
    time.sleep(600)


def start_worker(folder: str) -> None:
    """A parent with one busy worker."""
    from mergekit_lab.workers import Pool

    next(Pool(["cpu"]).run(work_long, [(folder,)]))
