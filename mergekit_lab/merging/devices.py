"""Devices for the arithmetic of a merge."""

from collections.abc import Sequence

import torch

from mergekit_lab.errors import InputError
from mergekit_lab.machine import list_devices

Devices = str | int | torch.device | Sequence[str | int | torch.device]
"""One device, or several that share the work."""


def parse_devices(device: object, spread: int | None = None) -> list[str]:
    """Devices by name: one, or a list of them.

    A number is a CUDA device's, as in torch. `auto` is all CUDA devices, else the CPU.

    Args:
        spread: what `spread` is on a CPU, up to so many processes; None: it is no name.

    Raises:
        InputError: no name, or no list of them.
    """
    if device == "auto" or (device == "spread" and spread):
        return list_devices(spread if device == "spread" and spread else 1)
    devices = device if isinstance(device, list | tuple) else [device]
    if not devices:
        raise InputError("device is an empty list")
    return [_parse_device(each) for each in devices]


def _parse_device(device: object) -> str:
    if isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{device}"
    if not isinstance(device, str | torch.device):
        raise InputError(f"device is {device!r}; it must be a name such as cpu or cuda:0, or a list of names")
    return str(device)


def resolve_device(device: str | torch.device) -> torch.device:
    """A device of this machine.

    Raises:
        InputError: no such device.
    """
    try:
        resolved = torch.device(device)
        resolved = torch.device("cuda", resolved.index or 0) if resolved.type == "cuda" else resolved
        torch.empty(0, device=resolved)
    except (RuntimeError, NotImplementedError, AssertionError):
        names = ", ".join(["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))])
        raise InputError(f"device {str(device)!r} does not exist: this machine has {names}") from None
    return resolved
