"""What of the machine this process may use."""

import os
import shutil
from pathlib import Path


def usable_cores() -> int:
    """Cores that this process may run on: under Slurm, `taskset` or in a cpuset fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def list_devices() -> list[str]:
    """What `device=auto` means: all CUDA devices, else the CPU."""
    import torch

    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]


def free_bytes(path: Path) -> int:
    """Free bytes of the disk that holds a file or folder, or would."""
    path = path.expanduser().absolute()
    return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
