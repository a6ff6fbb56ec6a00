"""Input Gram matrices of linear layers, by which RegMean weighs experts and CAT finds conflicts.

Jin et al. 2023, "Dataless knowledge fusion by merging weights of language models", section 3.2. With the rows
`x` that enter a layer (every position of every sample), `G = mean of x xᵀ`: a mean, as in yule-BUAA/MergeLM, so
that Grams of different amounts of data weigh the same. Exact; memory is the Grams and one batch's activations.
Of norms, which multiply what they normalize by a weight, it is the mean of its squares, input by input.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mergekit_lab.batches import Batch
from mergekit_lab.curvature.attention import ATTENTION, run_attention
from mergekit_lab.curvature.fisher import switch_to_evaluation
from mergekit_lab.errors import InputError

_SUFFIX = "weight"
_PRODUCTS = {functional.linear: ((0, "input"), (1, "weight")), torch.addmm: ((1, "mat1"), (2, "mat2"))}
"""Where these take inputs and a weight; the second is transformers' Conv1D, with weights [in, out]."""
_NORMS = (functional.layer_norm, functional.rms_norm)


class InputSums(TorchFunctionMode):
    """Adds up `xᵀx` at every linear call with a known weight, and `x²` at every multiplication with a
    norm's.
    """

    def __init__(self, keys: Mapping[int, str]) -> None:
        super().__init__()
        self.keys = keys
        self.sums: dict[str, Tensor] = {}
        self.rows: dict[str, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            inputs, weight = (args[at] if len(args) > at else kwargs[name] for at, name in _PRODUCTS[func])
            if id(weight) in self.keys:
                self._add(self.keys[id(weight)], inputs)
        if func in _NORMS:
            weight = kwargs.get("weight")  # torch hands all but the first two on by name
            if id(weight) in self.keys:
                plain = {name: value for name, value in kwargs.items() if name not in ("weight", "bias")}
                self._add(self.keys[id(weight)], func(*args, **plain), alone=True)
        if func is Tensor.mul and len(args) == 2:  # transformers' norms, which multiply by themselves
            for weight, inputs in (args, args[::-1]):
                if id(weight) in self.keys and weight.dim() == 1 and isinstance(inputs, Tensor):
                    self._add(self.keys[id(weight)], inputs, alone=True)
        if func is ATTENTION:
            try:
                with self:
                    return run_attention(*args, **kwargs)
            except NotImplementedError:
                pass  # its projections stay without a Gram
        return func(*args, **kwargs)

    def compute_means(self) -> dict[str, Tensor]:
        """Of what was added up, over the rows."""
        return {key: total / self.rows[key] for key, total in self.sums.items()}

    def _add(self, key: str, inputs: Tensor, alone: bool = False) -> None:
        """`xᵀx` of all rows; `alone`: of every input with itself only."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        rows = rows if rows.dtype == torch.float64 else rows.float()
        if alone:
            self.sums[key] = self.sums.get(key, 0) + rows.square().sum(dim=0)
        elif key in self.sums:
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
        `attn.in_proj_weight`): `[in, in]`, float32 (float64 where the inputs are), on their device; of a norm
        (`ln_1`) `[in]`, the diagonal. A layer that no batch reached has none.

    Raises:
        InputError: no linear layer was reached.
    """
    inside = InputSums(list_keys(model))
    with switch_to_evaluation(model):
        for batch in batches:
            with inside:
                _ = model(**batch) if isinstance(batch, Mapping) else model(batch[0])
    if not any(total.dim() == 2 for total in inside.sums.values()):
        raise InputError("no linear layer was reached: are there batches, and does the model have any?")
    return inside.compute_means()


def list_keys(model: nn.Module) -> dict[int, str]:
    """What the Grams of a module's weights are called, by the weights' identity."""
    return {
        id(p): name.removesuffix(_SUFFIX)[:-1]
        for name, p in model.named_parameters()
        if name.endswith(_SUFFIX) and p.dim() in (1, 2)
    }
