"""Who a process is, so that another one can tell whether it still lives.

A process id is not enough. Ids are reused, every container of a host has its own, and hosts that share a file
system do not see each other's. So a process is identified by its host, the host's boot, its pid namespace, its
pid and its start time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LARGEST = 2**31 - 1
"""The largest pid. To `kill`, zero and negative numbers mean groups of processes."""


def identify_process() -> dict[str, Any]:
    """This process, as a JSON-able mapping."""
    return _read_namespace() | {"pid": os.getpid(), "started": _read_start(os.getpid())}


def has_ended(owner: Mapping[str, Any]) -> bool:
    """Whether the process that `identify_process` described has certainly ended.

    False also if it runs on another host or in another container, or if `owner` describes no process. The
    caller then needs another sign of life.
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
    """The host, boot and pid namespace within which a pid names one process."""
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
    """When a process began, in the kernel's ticks; "ended" for a zombie; "" if that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]
