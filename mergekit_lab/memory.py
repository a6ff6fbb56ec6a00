"""A device's memory: work that is made smaller until it fits, and the peak."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from mergekit_lab.errors import InputError, say_error

log = logging.getLogger(__name__)
Result = TypeVar("Result")


def halve(size: int) -> int | None:
    """Half of `size`, at least 1; None of 1."""
    return size // 2 if size > 1 else None


def fit_memory(
    work: Callable[[int], Result],
    size: int,
    *,
    what: str,
    setting: str,
    way_out: str,
    smaller: Callable[[int], int | None] = halve,
) -> tuple[Result, int]:
    """`work(size)`; if the device runs out of memory, again with the next `smaller` size, until one fits.

    Args:
        work: what is done.
        size: of its pieces, or their number.
        what: names the work in messages, such as "evaluating mnist".
        setting: the name under which users set the size, such as "evaluation_batch_size".
        way_out: what to do where nothing is smaller, such as "set device=cpu".
        smaller: the next size; None if there is none.

    Returns:
        What `work` returned, and the size that fit.

    Raises:
        InputError: the smallest does not fit either.
    """
    while True:
        try:
            return work(size), size
        except torch.OutOfMemoryError as error:
            cause = say_error(error)
            less = smaller(size)
        if less is None:
            raise InputError(
                f"{what} does not fit the device's memory with {setting}={size} ({cause}): {way_out}"
            )
        log.warning(
            "out of memory %s with %s=%d: trying %d (set %s=%d to start there)",
            what, setting, size, less, setting, less,
        )  # fmt: skip
        size = less
        torch.cuda.empty_cache()  # out of `except`, where the error would keep what did not fit


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of a CUDA device's memory. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read_peak_memory(device: torch.device) -> int | None:
    """The peak in bytes since the last reset of a CUDA device; None on a CPU, which knows only a process's."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def read_total_memory(device: torch.device) -> int:
    """Bytes of a CUDA device; 0 on a CPU, which shares its memory with other programs."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def read_free_memory(device: torch.device) -> int:
    """Free bytes of a CUDA device, including those that torch keeps for reuse; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept
