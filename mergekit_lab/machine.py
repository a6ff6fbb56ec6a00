"""The cores, devices and disk that this process may use."""

import os
import shutil
from pathlib import Path


def count_cores() -> int:
    """Cores that this process may run on. Slurm, `taskset` and cpusets allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def list_devices(processes: int = 1) -> list[str]:
    """What `device=auto` means: all CUDA devices, or else the CPU, once for each of at most `processes`
    processes. No more are listed than there are cores."""
    import torch

    cards = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return cards or ["cpu"] * min(processes, count_cores())


def count_free_bytes(path: Path) -> int:
    """Free bytes of the disk that holds a file or folder, or will hold it."""
    path = path.expanduser().absolute()
    return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
