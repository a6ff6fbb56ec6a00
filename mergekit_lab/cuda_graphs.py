"""Record work on a CUDA device once, and replay it with a single launch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

DEVICES = ("cuda",)
"""Kinds of devices that have CUDA graphs."""


class GraphStream:
    """A stream of a CUDA device in which graphs are recorded, with a memory pool that all of them share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Within the block, work goes to this stream. It waits for the current stream at the start, and the
        current stream waits for it at the end."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    def record(
        self, run: Callable[[], Result], generators: Sequence[torch.Generator] = ()
    ) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Record `run` without executing it: the graph, and the tensors that a replay fills.

        Only this thread's calls are recorded, because other threads copy the next batches meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()
        return graph, result
