"""CUDA graphs that need no GPU: what torch computes meanwhile, to be computed again on the same tensors.

As with real ones a result is written where the recorded one was, numbers are those of the recording, and
to read a value on the host is refused. Unlike real ones they compute while they record.
"""

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HOST = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")
recording = [False]


class OperationRecorder(TorchDispatchMode):
    """A graph: `calls` are the operations and their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.replays = 0
        self.computed = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in _HOST:
            raise RuntimeError(f"{func._schema.name} waits for the device")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        if self.computed:
            self.computed = False
            return
        self.replays += 1
        tensors = [leaf for leaf in tree_leaves(self.calls) if isinstance(leaf, Tensor)]
        touched = [tensor for tensor in tensors if not tensor.is_inference()]
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(touched)):  # autograd sees no replay
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                storages = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and _place(old) not in storages:
                        old.copy_(new)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedGraphStream:
    """Stands in for `cuda_graphs.GraphStream`; `graphs` are all that were recorded."""

    graphs: ClassVar[list[OperationRecorder]] = []

    def __init__(self, device: torch.device) -> None:
        self.graphs.clear()

    def stream(self):
        return nullcontext()

    def record(self, run, generators=()):
        graph = OperationRecorder()
        recording[0] = True
        try:
            with graph:
                result = run()
        finally:
            recording[0] = False
        self.graphs.append(graph)
        return graph, result
