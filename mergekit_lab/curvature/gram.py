"""Input Gram matrices of linear layers: what RegMean weighs experts with.

Jin et al. 2023, "Dataless knowledge fusion by merging weights of language models", section 3.2. With the rows
`x` that enter a layer (every position of every sample), `G = mean of x xᵀ`: a mean, as in yule-BUAA/MergeLM, so
that Grams of different amounts of data weigh the same. Exact; memory is the Grams and one batch's activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mergekit_lab.batches import Batch
from mergekit_lab.curvature.attention import ATTENTION, attention
from mergekit_lab.curvature.fisher import evaluating
from mergekit_lab.errors import InputError

_SUFFIX = "weight"


class _Inputs(TorchFunctionMode):
    """Adds up `xᵀx` at every linear call with a known weight."""

    def __init__(self, keys: Mapping[int, str]) -> None:
        super().__init__()
        self.keys = keys
        self.sums: dict[str, Tensor] = {}
        self.rows: dict[str, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if id(weight) in self.keys:
                self._add(self.keys[id(weight)], args[0] if args else kwargs["input"])
        if func is torch.addmm:  # transformers' Conv1D, with weights [in, out]
            weight = args[2] if len(args) > 2 else kwargs["mat2"]
            if id(weight) in self.keys:
                self._add(self.keys[id(weight)], args[1] if len(args) > 1 else kwargs["mat1"])
        if func is ATTENTION:
            try:
                with self:
                    return attention(*args, **kwargs)
            except NotImplementedError:
                pass  # its projections stay without a Gram
        return func(*args, **kwargs)

    def _add(self, key: str, inputs: Tensor) -> None:
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        rows = rows if rows.dtype == torch.float64 else rows.float()
        if key in self.sums:
            self.sums[key].addmm_(rows.T, rows)
        else:
            self.sums[key] = rows.T @ rows
        self.rows[key] = self.rows.get(key, 0) + len(rows)


@torch.no_grad()
def input_grams(model: nn.Module, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """The mean of `x xᵀ` over the inputs of every linear layer.

    Args:
        model: put into evaluation mode for the duration.
        batches: as `diagonal_fisher` takes them; labels are passed on in mappings and not looked at. Every
            row counts, padding too: leave it out of the batches where it should not.

    Returns:
        By the name of the weight without its end (`mlp.c_fc` for `mlp.c_fc.weight`, `attn.in_proj` for
        `attn.in_proj_weight`): `[in, in]`, float32 (float64 where the inputs are), on their device. A layer
        that no batch reached has none.

    Raises:
        InputError: no linear layer was reached.
    """
    keys = {
        id(p): name.removesuffix(_SUFFIX)[:-1]
        for name, p in model.named_parameters()
        if name.endswith(_SUFFIX) and p.dim() == 2
    }
    inside = _Inputs(keys)
    with evaluating(model):
        for batch in batches:
            with inside:
                _ = model(**batch) if isinstance(batch, Mapping) else model(batch[0])
    if not inside.sums:
        raise InputError("no linear layer was reached: are there batches, and does the model have any?")
    return {key: total / inside.rows[key] for key, total in inside.sums.items()}
