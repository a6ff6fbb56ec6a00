"""Parameters that FSDP2 has spread over processes: their local parts, and norms over all of them.

A sharded tensor (`torch.distributed.tensor.DTensor`) is known here by its `to_local`, because importing its
class takes as long as importing torch.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_WHOLE = (Tensor, torch.nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a part of `tensor`, or one of several copies."""
    return type(tensor) not in _WHOLE and hasattr(tensor, "to_local")


def take_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This process's part of each tensor, sharing its memory (under `no_grad`); plain tensors as they are."""
    return [take_part(t) for t in tensors]


def take_part(tensor: Tensor) -> Tensor:
    """This process's part of `tensor`; a plain tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def take_part_like(full: Tensor, like: Tensor) -> Tensor:
    """The part of `full` that this process holds of `like`, which has the same shape. No communication.

    Every process must bring the same `full`.
    """
    return take_part(spread_like(full, like))


def spread_like(full: Tensor, like: Tensor) -> Tensor:
    """`full` sharded as `like` is, which has the same shape; as it is if `like` is whole. No communication.

    Every process must bring the same `full`.
    """
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    of: Any = like
    return distribute_tensor(full.to(of.device), of.device_mesh, of.placements, src_data_rank=None)


def find_first_entry(tensor: Tensor) -> int | None:
    """Where this process's part of `tensor` begins among all its entries; None if it is not one run of them.

    0 for a plain tensor.
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


def global_norm(tensors: Sequence[Tensor]) -> Any:
    """The L2 norm over all entries of all `tensors` together (any shapes, devices and floating dtypes).

    Low precisions are accumulated in float32: squares of ordinary gradients underflow in float16. Sharded
    tensors count with all their parts, so every process of their mesh must call this.

    Returns:
        A tensor without dimensions, which nobody need wait for, where all are whole and on one device; else a
        number.
    """
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    norms = list(torch._foreach_norm(take_parts(tensors), 2, wide))
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for position, t in enumerate(tensors):
        if is_sharded(t):
            of: Any = t
            kinds.setdefault((of.device_mesh, of.placements), []).append(position)
    for (mesh, placements), positions in kinds.items():
        squares = torch.stack([norms[position] for position in positions]).square()
        for position, square in zip(positions, _add_up(squares, mesh, placements), strict=True):
            norms[position] = square.sqrt()
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    stays = not kinds and all(t.device == norm.device for t in tensors)
    return norm if stays else norm.item()


def _add_up(parts: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """`parts` added up over the dimensions of `mesh` that shard, not over those that only copy."""
    from torch.distributed.tensor import DTensor, Partial

    adding = [Partial() if placement.is_shard() else placement for placement in placements]
    return DTensor.from_local(parts, mesh, adding, run_check=False).full_tensor()
