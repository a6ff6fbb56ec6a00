"""Build an optimizer from parameters, with or without names, and a base."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mergekit_lab.errors import InputError, join_names

Setting = float | list[float]
"""A hyper-parameter: one number, or one for each parameter where groups differ."""

Parameters = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
BaseOptimizer = Callable[[Any], Optimizer]


def split_names(parameters: Parameters) -> tuple[list[Any], dict[Tensor, str]]:
    """Separate tensors or groups from their names."""
    names: dict[Tensor, str] = {}
    tensors: list[Tensor] = []

    def strip(entry: Any) -> Any:
        if isinstance(entry, dict) and "params" in entry:
            return {**entry, "params": [strip(e) for e in _to_list(entry["params"])]}
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(tensor, Tensor):
            raise InputError(f"cannot optimize a {type(tensor).__name__}: pass model.named_parameters()")
        if name is not None:
            names[tensor] = name
        tensors.append(tensor)
        return tensor

    plain = [strip(entry) for entry in _to_list(parameters)]
    if not tensors:
        raise InputError("there are no parameters to optimize: is every parameter filtered out?")
    count = len(set(tensors))
    if count < len(tensors):
        twice = [t for t, times in Counter(tensors).items() if times > 1]
        raise InputError(f"these parameters are listed twice: {describe(twice, names)}; list each once")
    if names and len(names) < count:
        raise InputError(f"{len(names)} of {count} parameters have a name: name all of them or none")
    if odd := {str(t.dtype) for t in tensors if not t.is_floating_point()}:
        raise InputError(f"only real floating parameters can be optimized, not {join_names(odd)}")
    return plain, names


def describe(parameters: Iterable[Tensor], names: Mapping[Tensor, str]) -> str:
    """Describe parameters by name, or by shape if they have none."""
    return join_names(names.get(p, f"unnamed, shape {tuple(p.shape)}") for p in parameters)


def _to_list(parameters: Any) -> list[Any]:
    if isinstance(parameters, Tensor):
        return [parameters]
    if isinstance(parameters, set | dict) or not isinstance(parameters, Iterable):
        raise InputError(
            f"parameters must come in order, not as a {type(parameters).__name__}: "
            "pass model.named_parameters()"
        )
    return list(parameters)


def combine(function: Callable[..., float], *settings: Setting) -> Setting:
    """Apply `function` to settings: a number if all of them are numbers, else a list with one per parameter."""
    if not any(isinstance(setting, list) for setting in settings):
        return function(*settings)
    columns = [setting if isinstance(setting, list) else repeat(setting) for setting in settings]
    return [function(*row) for row in zip(*columns, strict=False)]


def scale(tensors: Sequence[Tensor], factor: Any) -> list[Tensor]:
    """Multiply each tensor by a factor: a number, a 0-d tensor, or a list with one per tensor.

    A tensor as a factor does not widen the dtype.
    """
    if isinstance(factor, Tensor) and any(t.dtype != factor.dtype for t in tensors):
        return [t * factor for t in tensors]
    return list(torch._foreach_mul(list(tensors), factor))


def lerp_(tensors: list[Tensor], ends: Sequence[Tensor], weight: Setting) -> None:
    """t += weight · (end − t), in place, pairwise."""
    if not isinstance(weight, list):
        torch._foreach_lerp_(tensors, list(ends), weight)
        return
    for tensor, end, each in zip(tensors, ends, weight, strict=True):
        tensor.lerp_(end, each)


def build(base: BaseOptimizer, parameters: list[Any]) -> Optimizer:
    """Build the base optimizer of these parameters or groups.

    Raises:
        InputError: `base` is not callable, returns no torch optimizer, or returns LBFGS.
    """
    way_out = "pass a callable such as functools.partial(torch.optim.AdamW, lr=1e-5)"
    if not callable(base):
        raise InputError(f"base is a {type(base).__name__}, not a callable: {way_out}")
    optimizer = base(parameters)
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"base returned a {type(optimizer).__name__}, not a torch optimizer: {way_out}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("LBFGS evaluates the loss itself and cannot be a base: use a first-order optimizer")
    return optimizer


def mix_gradients(first: dict[Tensor, Tensor], mix: Callable[..., Sequence[Tensor]]) -> None:
    """Replace gradients by `mix(params, first, second)`, where `second` are the current gradients.

    Parameters without a current gradient, or not in `first`, are not changed.
    """
    both = [p for p in first if p.grad is not None]
    if both:
        second = [p.grad for p in both if p.grad is not None]
        for p, g in zip(both, mix(both, [first[p] for p in both], second), strict=True):
            p.grad = g
