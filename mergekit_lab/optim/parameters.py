"""What an optimizer may be built from: parameters with or without names, and a base."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mergekit_lab.errors import InputError, listing

Parameters = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
BaseOptimizer = Callable[[Any], Optimizer]


def without_names(parameters: Parameters) -> tuple[list[Any], dict[Tensor, str]]:
    """The same tensors or groups with names taken off, and the name of each tensor that had one."""
    names: dict[Tensor, str] = {}
    tensors: list[Tensor] = []

    def strip(entry: Any) -> Any:
        if isinstance(entry, dict) and "params" in entry:
            return {**entry, "params": [strip(e) for e in _listed(entry["params"])]}
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(tensor, Tensor):
            raise InputError(f"cannot optimize a {type(tensor).__name__}: pass model.named_parameters()")
        if name is not None:
            names[tensor] = name
        tensors.append(tensor)
        return tensor

    plain = [strip(entry) for entry in _listed(parameters)]
    if not tensors:
        raise InputError("there are no parameters to optimize: is every parameter filtered out?")
    count = len(set(tensors))
    if names and len(names) < count:
        raise InputError(f"{len(names)} of {count} parameters have a name: name all of them or none")
    if odd := {str(t.dtype) for t in tensors if not t.is_floating_point()}:
        raise InputError(f"only real floating parameters can be optimized, not {listing(odd)}")
    return plain, names


def _listed(parameters: Any) -> list[Any]:
    if isinstance(parameters, Tensor):
        return [parameters]
    if isinstance(parameters, set | dict) or not isinstance(parameters, Iterable):
        raise InputError(
            f"parameters must come in order, not as a {type(parameters).__name__}: "
            "pass model.named_parameters()"
        )
    return list(parameters)


def build(base: BaseOptimizer, parameters: list[Any]) -> Optimizer:
    """The base optimizer of these parameters or groups.

    Raises:
        InputError: `base` is not callable, gives no torch optimizer, or gives LBFGS.
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
