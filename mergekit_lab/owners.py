"""Who a process is, so that another one can tell whether it still lives.

The number of a process is not enough. Numbers are used again, containers of one host count for themselves, and
hosts that share a file system know nothing of each other's. So a process is known by its host, the host's boot,
the namespace of its number, the number and the time it began.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LARGEST = 2**31 - 1
"""A number of a process; larger ones, zero and negative ones mean something else to `kill`, or nothing."""


def identify_process() -> dict[str, Any]:
    """This process, as JSON holds it."""
    return _read_namespace() | {"pid": os.getpid(), "started": _read_start(os.getpid())}


def has_ended(owner: Mapping[str, Any]) -> bool:
    """Whether the process that `identify_process` described has ended, for certain.

    False too of a process of another host or container, and of what describes none: there another sign of life
    must be waited for.
    """
    pid = owner.get("pid")
    here = all(owner.get(name) == value for name, value in _read_namespace().items())
    if not here or type(pid) is not int or not 0 < pid <= _LARGEST:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    started = _read_start(pid)
    return bool(started and owner.get("started") and started != owner["started"])


def _read_namespace() -> dict[str, Any]:
    """Where the number of a process of this one's surroundings means something."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return {"host": socket.gethostname(), "boot": boot, "namespace": namespace}


def _read_start(pid: int) -> str:
    """When a process began, in the kernel's ticks; "ended" of one that only its parent has still to collect."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]
