"""What of the machine this process may use."""

import os
import shutil
from pathlib import Path


def count_cores() -> int:
    """Cores that this process may run on: under Slurm, `taskset` or in a cpuset fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def list_devices(processes: int = 1) -> list[str]:
    """What `device=auto` means: all CUDA devices, else the CPU; there up to so many processes, one a core."""
    import torch

    cards = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return cards or ["cpu"] * min(processes, count_cores())


def count_free_bytes(path: Path) -> int:
    """Free bytes of the disk that holds a file or folder, or would."""
    path = path.expanduser().absolute()
    return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
