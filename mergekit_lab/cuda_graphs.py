"""Work on a CUDA device that is recorded once and replayed, at the price of one launch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

DEVICES = ("cuda",)
"""Kinds of devices that have such graphs."""


class GraphStream:
    """Where graphs are recorded: a stream of a CUDA device, and the memory that all recordings share.

    Its stream waits for the one that is in use, and is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Within the block work goes to the card's stream."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    def record(
        self, run: Callable[[], Result], generators: Sequence[torch.Generator] = ()
    ) -> tuple[torch.cuda.CUDAGraph, Result]:
        """What `run` would compute, as a graph; and where its result will be.

        Only this thread's calls are part of it: others bring the next batches meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()
        return graph, result
