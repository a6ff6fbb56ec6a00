"""Weights sharded over processes (FSDP2), with checkpoints as one process writes them.

Lightning's own strategy asks torch for the state of an optimizer. Torch keeps only moments and groups, not what
our optimizers add, such as the number of steps that offsets depend on. To load, it first steps without a
closure, which optimizers with two evaluations cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mergekit_lab.optim.sharded import is_sharded, spread_like
from mergekit_lab.optim.wrapper import STATE_KEY, WrappedOptimizer


class Sharded(ModelParallelStrategy):
    """FSDP2 over all processes. Weights and optimizers are saved whole, and sharded again when loaded.

    Args:
        processes: number of processes.
    """

    lightning_restore_optimizer = True

    def __init__(self, processes: int) -> None:
        super().__init__(processes, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict with whole tensors on the CPU. All processes but the first return an empty one."""
        state = tree_map(self._gather, optimizer.state_dict())
        return state if self.is_global_zero else {}

    def _gather(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        whole: Tensor = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
        return whole.cpu() if self.is_global_zero else None

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As Lightning does, without the optimizers, which `load_optimizer_state_dict` loads."""
        optimizers, self.optimizers = self.optimizers, []
        try:
            return super().load_checkpoint(checkpoint_path, weights_only)
        finally:
            self.optimizers = optimizers

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(_spread(state, optimizer))


def _spread(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state dict with what has a parameter's shape sharded as the parameter is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def fit(parameter: Tensor, value: Any) -> Any:
        fits = isinstance(value, Tensor) and value.shape == parameter.shape
        return spread_like(value, parameter) if fits else value

    def fit_all(by_position: Mapping[int, Any]) -> dict[int, Any]:
        return {i: tree_map(partial(fit, parameters[i]), value) for i, value in by_position.items()}

    spread = {**state, "state": fit_all(state["state"])}
    if isinstance(optimizer, WrappedOptimizer):
        own = state[STATE_KEY]
        spread[STATE_KEY] = own | {name: fit_all(own[name]) for name in optimizer.saved_tensors}
    return spread
