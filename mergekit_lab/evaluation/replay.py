"""Forward passes of evaluation that are recorded in CUDA graphs and replayed.

A search writes every candidate into the weights of one model. So one recorded forward pass serves all of them.
This helps small models, whose kernels end before the host has launched the next ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mergekit_lab.cuda_graphs import DEVICES, GraphStream
from mergekit_lab.errors import say_error

log = logging.getLogger(__name__)

MOST_PARAMETERS = 5 * 10**7
"""A larger model keeps a card busy as it is."""
_MOST_SHAPES = 32


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Any


class Recordings:
    """The recorded forward passes of one model, which live as long as it does.

    They read weights at the addresses at recording. If the weights have moved since, all recordings are void.
    """

    def __init__(self, device: torch.device) -> None:
        self._graph_stream = GraphStream(device)
        self._by_shape: dict[Hashable, _Recording] = {}
        self._seen: Counter[Hashable] = Counter()
        self._weights: tuple[int, ...] = ()
        self._may_record = True

    def check_weights(self, model: nn.Module) -> None:
        """Forget what was recorded, if the weights lie elsewhere now."""
        weights = tuple(t.data_ptr() for each in (model.parameters(), model.buffers()) for t in each)
        if weights != self._weights:
            self._by_shape.clear()
            self._weights = weights

    def run(self, model: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> Any:
        """What the model makes of its arguments."""
        how = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), model.training
        tensors = [*args, *kwargs.values()]
        key = (how, *kwargs, *((t.shape, t.dtype) for t in tensors))
        with self._graph_stream.stream():
            recording = self._by_shape.get(key)
            if recording is None and self._seen[key] and self._may_record:
                recording = self._record(model, args, kwargs, key)
            if recording is None:
                self._seen[key] += 1
                return model(*args, **kwargs)
            for held, tensor in zip(recording.inputs, tensors, strict=True):
                held.copy_(tensor)
            recording.graph.replay()
            return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, recording.output)

    def _record(
        self, model: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], key: Hashable
    ) -> _Recording | None:
        args, kwargs = tree_map(torch.clone, (args, dict(kwargs)))
        try:
            graph, output = self._graph_stream.record(lambda: model(*args, **kwargs))
        except Exception as error:
            self._may_record = False
            log.info("evaluation runs as written (%s)", say_error(error))
            return None
        self._by_shape[key] = _Recording(graph, [*args, *kwargs.values()], output)
        self._may_record = len(self._by_shape) < _MOST_SHAPES
        return self._by_shape[key]


_KNOWN: WeakKeyDictionary[nn.Module, Recordings] = WeakKeyDictionary()


class Replayed(nn.Module):
    """A model whose forward passes are replayed."""

    def __init__(self, model: nn.Module, recordings: Recordings) -> None:
        super().__init__()
        self.model = model
        self._recordings = recordings

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """What the model makes of tensors."""
        return self._recordings.run(self.model, args, kwargs)


def replay_forward(model: nn.Module) -> nn.Module:
    """`model` with replayed forward passes, if that is possible and saves time; else `model` itself.

    Args:
        model: in evaluation mode, on one device.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if hooked or device.type not in DEVICES or sum(p.numel() for p in parameters) > MOST_PARAMETERS:
        return model
    if model not in _KNOWN:
        _KNOWN[model] = Recordings(device)
    _KNOWN[model].check_weights(model)
    return Replayed(model, _KNOWN[model])
