"""Parameters sharded over processes by FSDP2: their local parts, and norms over all parts.

A sharded tensor (`torch.distributed.tensor.DTensor`) is recognized by its `to_local`, because importing its
class takes as long as importing torch.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_WHOLE = (Tensor, torch.nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is spread over processes, in parts or copies."""
    return type(tensor) not in _WHOLE and hasattr(tensor, "to_local")


def is_distributed() -> bool:
    """Whether this process trains together with others, or could."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def take_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This process's part of each tensor, sharing its memory (under `no_grad`). Plain tensors are returned as
    they are.
    """
    return [take_part(t) for t in tensors]


def take_part(tensor: Tensor) -> Tensor:
    """This process's part of `tensor`. A plain tensor is returned as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def spread_like(full: Tensor, like: Tensor) -> Tensor:
    """Shard `full` as `like` is sharded, which has the same shape. If `like` is whole, return `full`. It needs
    no communication.

    Every process must bring the same `full`.
    """
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    of: Any = like
    return distribute_tensor(full.to(of.device), of.device_mesh, of.placements, src_data_rank=None)


def find_first_entry(tensor: Tensor) -> int | None:
    """The index of the first entry of this process's part in the whole tensor. None if the part is not
    contiguous.

    It is 0 for a plain tensor.
    """
    if not is_sharded(tensor):
        return 0 if tensor.is_contiguous() else None
    of: Any = tensor
    cuts = [(dim, placement) for dim, placement in enumerate(of.placements) if not placement.is_replicate()]
    if not take_part(tensor).is_contiguous() or len(cuts) > 1:
        return None
    if not cuts:
        return 0
    dim, placement = cuts[0]
    if type(placement).__name__ != "Shard" or placement.dim != 0:
        return None
    rows = -(-of.shape[0] // of.device_mesh.size(dim))  # as torch.chunk cuts
    first = min(of.shape[0], rows * of.device_mesh.get_local_rank(dim))
    return int(first * (of.numel() // max(1, of.shape[0])))


def compute_global_norm(tensors: Sequence[Tensor]) -> Any:
    """The L2 norm over all entries of all `tensors` together (any shapes, devices and floating dtypes).

    Low precisions are accumulated in float32, because squares of ordinary gradients underflow in float16.
    Sharded tensors count with all their parts, so every process of their mesh must call this.

    Returns:
        A 0-d tensor, without waiting for the device, if all tensors are whole and on one device; else a number.
    """
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    norms = list(torch._foreach_norm(take_parts(tensors), 2, wide))
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for position, t in enumerate(tensors):
        if is_sharded(t):
            of: Any = t
            kinds.setdefault((of.device_mesh, of.placements), []).append(position)
    if kinds:
        from torch.distributed.tensor import DTensor, Partial
    for (mesh, placements), positions in kinds.items():
        squares = torch.stack([norms[position] for position in positions]).square()
        # added up over the dimensions that shard, not over those that only copy
        adding = [Partial() if placement.is_shard() else placement for placement in placements]
        whole = DTensor.from_local(squares, mesh, adding, run_check=False).full_tensor()
        for position, square in zip(positions, whole, strict=True):
            norms[position] = square.sqrt()
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    stays = not kinds and all(t.device == norm.device for t in tensors)
    return norm if stays else norm.item()
