"""Memory for a merge's results, and how its inputs reach a device."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce

import torch
from torch import Tensor


def allocate_result(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor. On a CPU a large one has pages of its own, which the system has back as soon as
    it is freed: malloc keeps up to half a gigabyte of freed results. They are large where the system allows it:
    to get small ones takes a fifth of the time of a merge.
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
"""Bytes of a result from which it has pages of its own."""


def fill(out: Tensor, rows: Sequence[Sequence[Tensor]]) -> None:
    """Copy the parts of each row, end to end, into a row of `out` `[rows, n]`, which is contiguous.

    On one device all at once. From another device a row at a time, because it holds pinned memory meanwhile.
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
    """The parts, end to end, on another device, in their own dtype: converted there, half as much is sent.

    From the host they go through pinned memory, so that nobody waits for the transfer.
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
    """A tensor on a device: itself if it is there."""
    return tensor if tensor.device == device else send([tensor], device).view(tensor.shape)
