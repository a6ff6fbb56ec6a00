"""Forward passes of evaluation that are recorded in CUDA graphs and replayed.

A search writes every candidate into the weights of one model. So a forward pass that was recorded once serves
all of them. This is for models whose kernels are done before the host has launched the next ones.
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

Arguments = Mapping[str | int, Tensor]
"""By position or name."""


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: dict[str | int, Tensor]
    output: Any


class Recordings:
    """The recorded forward passes of one model, which live as long as it does.

    They read weights at the addresses they had. Weights that were moved since make all of them void.
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

    def run(self, model: nn.Module, arguments: Arguments) -> Any:
        """What the model makes of its arguments."""
        how = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), model.training
        key = (how, *((name, t.shape, t.dtype) for name, t in arguments.items()))
        with self._graph_stream.stream():
            recording = self._by_shape.get(key)
            if recording is None and self._seen[key] and self._may_record:
                recording = self._record(model, arguments, key)
            if recording is None:
                self._seen[key] += 1
                return _call(model, arguments)
            for name, tensor in arguments.items():
                recording.inputs[name].copy_(tensor)
            recording.graph.replay()
            return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, recording.output)

    def _record(self, model: nn.Module, arguments: Arguments, key: Hashable) -> _Recording | None:
        inputs = {name: tensor.clone() for name, tensor in arguments.items()}
        try:
            graph, output = self._graph_stream.record(lambda: _call(model, inputs))
        except Exception as error:
            self._may_record = False
            log.info("evaluation runs as written (%s)", say_error(error))
            return None
        self._by_shape[key] = _Recording(graph, inputs, output)
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
        arguments: dict[str | int, Tensor] = dict(enumerate(args))
        arguments.update(kwargs)
        return self._recordings.run(self.model, arguments)


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


def _call(model: nn.Module, arguments: Arguments) -> Any:
    positional = [tensor for name, tensor in arguments.items() if isinstance(name, int)]
    return model(*positional, **{name: tensor for name, tensor in arguments.items() if isinstance(name, str)})
