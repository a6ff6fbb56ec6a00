"""Where the arithmetic of a merge happens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mergekit_lab.errors import InputError

Devices = str | torch.device | Sequence[str | torch.device]
"""One device, or several that share the work."""


def resolve_device(device: str | torch.device) -> torch.device:
    """A device of this machine.

    Raises:
        InputError: no such device.
    """
    try:
        found = torch.device(device)
        found = torch.device("cuda", found.index or 0) if found.type == "cuda" else found
        torch.empty(0, device=found)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        count = torch.cuda.device_count()
        raise InputError(
            f"device {device!r} is not there: this machine has a CPU and {count} CUDA devices "
            f"({str(error).splitlines()[0]})"
        ) from None
    return found
