"""Allocate a merge's results, and copy its inputs to a device."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce

import torch
from torch import Tensor


def allocate_result(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor for a result.

    On a CPU, a large result gets its own pages by `mmap`, which return to the system as soon as it is freed.
    malloc would keep up to half a gigabyte of freed results. Huge pages are used if the system allows them,
    because getting small ones takes a fifth of a merge's time.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _OWN_PAGES or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


_OWN_PAGES = 1 << 20
"""Results of at least so many bytes get their own pages."""


def fill(out: Tensor, rows: Sequence[Sequence[Tensor]]) -> None:
    """Copy the parts of each row, end to end, into a row of the contiguous `out` `[rows, n]`.

    Rows on `out`'s device are copied together. Rows from another device are sent one at a time, because each
    needs pinned memory.
    """
    if any(row[0].device != out.device for row in rows):
        for slot, row in zip(out, rows, strict=True):
            if row[0].device == out.device:
                fill(slot[None], [row])
            else:
                slot.copy_(send(row, out.device))
        return
    parts = [part.reshape(-1) for row in rows for part in row]
    if all(part.dtype == out.dtype for part in parts):
        torch.cat(parts, out=out.view(-1))
    else:
        torch._foreach_copy_(out.view(-1).split([len(part) for part in parts]), parts)


def send(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Send the parts, end to end, to another device in their own dtype.

    The receiver converts them, because 16-bit parts are half as large as float32. From the host they go through
    pinned memory, so that the transfer is asynchronous.
    """
    from_host = parts[0].device.type == "cpu" and device.type == "cuda"
    dtype = reduce(torch.promote_types, {part.dtype for part in parts})
    size = sum(part.numel() for part in parts)
    whole = torch.empty(size, dtype=dtype, device=parts[0].device, pin_memory=from_host)
    first = 0
    for part in parts:
        whole[first : first + part.numel()].copy_(part.reshape(-1))
        first += part.numel()
    return whole.to(device, non_blocking=from_host)


def send_whole(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; the tensor itself if it is already there."""
    return tensor if tensor.device == device else send([tensor], device).view(tensor.shape)
