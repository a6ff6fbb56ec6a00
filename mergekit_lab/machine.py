"""What of the machine this process may use."""

import os


def usable_cores() -> int:
    """Cores that this process may run on: under Slurm, `taskset` or in a cpuset fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
