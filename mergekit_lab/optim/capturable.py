"""Make torch optimizers recordable in a CUDA graph: learning rate and step count on the device.

torch's optimizers can be recorded if their groups have `capturable` (the Adam family and others), or if a fused
kernel reads the rate from the device (SGD, Adagrad).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_CHANGED = ("lr", "capturable", "fused", "foreach")
HostSettings = list[dict[str, Any]]
"""By group, what `keep_on_device` changes, as it was."""


def can_keep_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a step of `optimizer` can read everything from `device`."""
    return all(
        "lr" in group
        and ("capturable" in group or bool(group.get("fused")) or _is_open(group))
        and all(p.device == device for p in group["params"])
        for group in optimizer.param_groups
    )


def keep_on_device(optimizer: Optimizer, device: torch.device) -> HostSettings:
    """Make `optimizer` read learning rates and step counts from `device`, if `can_keep_on_device`.

    If a group leaves the choice of torch's implementation open, the fused one runs, which is the fastest that
    reads the rate from the device. Schedulers of torch keep working. Call this after `load_state_dict`.
    """
    groups = optimizer.param_groups
    before = [{name: group[name] for name in _CHANGED if name in group} for group in groups]
    for group in groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device, copy=True)
        if "capturable" in group:
            group["capturable"] = True
        if _is_open(group):
            group |= {"fused": True, "foreach": False}
    for state in optimizer.state.values():
        if isinstance(step := state.get("step"), Tensor):
            state["step"] = step.to(device, torch.float32)
    return before


def _is_open(group: Mapping[str, Any]) -> bool:
    """Whether a group leaves it to torch which loop runs, and a fused one is among them."""
    return "fused" in group and group["fused"] is None and not group.get("foreach")


def describe_as_before(state_dict: Mapping[str, Any], before: HostSettings) -> None:
    """Undo `keep_on_device` in an optimizer's state dict, in place. Learning rates become numbers."""
    for group, settings in zip(state_dict["param_groups"], before, strict=True):
        group |= settings | {"lr": float(group["lr"])}


@dataclass(frozen=True)
class ReplayState:
    """The values that the host sets for a recorded step.

    Attributes:
        generator: random numbers, seeded anew for every step. A graph must register it.
        seed: the same seed, int64, for our kernels.
        factor: multiplies what the step adds or mixes; a 0-d tensor.
    """

    generator: torch.Generator
    seed: Tensor
    factor: Tensor
