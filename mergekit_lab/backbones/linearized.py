"""Fine-tuning in the tangent space: the model's first-order expansion around its pretrained weights.

Ortiz-Jimenez, Favero, Frossard: Task Arithmetic in the Tangent Space (NeurIPS 2023), section 5; FTTS in the
SAFT paper (Lee et al., ICLR 2025), appendix A.1. Reference implementation: gortizji/tangent_task_arithmetic.

    f_lin(x; θ) = f(x; θ0) + ∇f(x; θ0) (θ − θ0)

It is computed by one forward-mode product (`torch.func.jvp`). As in the reference, θ trains, starts at θ0 and
gets weight decay, and the normalization of an image's features stays outside the expansion. An expert stays
linear at evaluation, and so does a merge: it is the expansion at the merged θ. Where we differ: any model that
returns tensors, or a structure of tensors, can be expanded.

Fused attention has no forward-mode derivative, so attention is computed by its formula. In inference mode some
versions of torch (2.11) silently return zero as the derivative, so that mode is switched off.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from mergekit_lab.backbones.attention import keep_differentiable
from mergekit_lab.backbones.parametrization import Parametrization
from mergekit_lab.errors import InputError, join_names


class Tangent(nn.Module):
    """A model's expansion around the weights it has now, with the model's own state dict.

    The wrapped model's parameters are θ, and train. θ0 is in buffers that are not saved. A state dict of this
    module has the wrapped model's names and loads into either.

    Extra memory: a copy of the parameters, and the tangents of activations.

    Args:
        model: returns a tensor, or tensors in a structure that torch's pytrees know (transformers' outputs).

    Raises:
        InputError: the model has running statistics (batch norm), which have no expansion.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        running = [n for n, m in model.named_modules() if isinstance(m, _NormBase) and m.track_running_stats]
        if running:
            raise InputError(
                f"a model with running statistics cannot be linearized, and {join_names(running)} keep some: "
                "take finetuning=full"
            )
        _load_rules()
        self.model = model
        for position, parameter in enumerate(model.parameters()):
            self.register_buffer(f"origin_{position}", parameter.detach().clone(), persistent=False)
        self.register_state_dict_post_hook(_without_own_name)
        self.register_load_state_dict_pre_hook(_with_own_name)
        keep_differentiable(self)

    def train(self, mode: bool = True) -> Tangent:
        """Set the mode as usual, but keep attention differentiable."""
        super().train(mode)
        keep_differentiable(self)
        return self

    def get_base_model(self) -> nn.Module:
        """The wrapped model, whose weights are θ. peft gives this method its name."""
        return self.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The expansion of each tensor that the model returns.

        A model with an encoder uses `labels` as its decoder's input, and returns no loss.

        Raises:
            InputError: `labels` for another kind of model, because a loss is not expanded, or `use_cache=True`.
        """
        kwargs = self._accept(kwargs)
        weights = dict(self.model.named_parameters())
        origin = {name: getattr(self, f"origin_{position}") for position, name in enumerate(weights)}
        change = {name: p - origin[name] for name, p in weights.items()}

        def compute_outputs(values: dict[str, Tensor]) -> Any:
            return functional_call(self.model, values, args, kwargs)

        grad = torch.is_grad_enabled()  # asked first: leaving inference mode turns gradients on
        with torch.inference_mode(False), torch.set_grad_enabled(grad), sdpa_kernel(SDPBackend.MATH):
            value, slope = jvp(compute_outputs, (origin,), (change,))  # type: ignore[misc]
        return tree_map(torch.add, value, slope)

    def _accept(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        labels = kwargs.get("labels")
        if labels is not None and hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
            read: Any = self.model.prepare_decoder_input_ids_from_labels
            kwargs = {"decoder_input_ids": read(labels=labels), **kwargs, "labels": None}
        elif labels is not None:
            raise InputError(
                "a linearized model does not take labels, because its loss would be linearized too: compute "
                "the loss of the logits that it returns"
            )
        if hasattr(getattr(self.model, "config", None), "use_cache"):
            if kwargs.get("use_cache"):
                raise InputError("a linearized model keeps no cache: leave use_cache out")
            return {**kwargs, "use_cache": False}
        return kwargs


@cache
def _load_rules() -> None:
    """torch loads its forward-mode rules at the first use, with a warning about how they are written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated")
        jvp(torch.sin, (torch.zeros(1),), (torch.zeros(1),))


def _without_own_name(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    own = f"{prefix}model."
    for name in [n for n in state if n.startswith(own)]:
        state[prefix + name.removeprefix(own)] = state.pop(name)


def _with_own_name(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [n for n in state if n.startswith(prefix)]:
        state[f"{prefix}model.{name.removeprefix(prefix)}"] = state.pop(name)


@dataclass(frozen=True)
class Linearized(Parametrization):
    """Train and evaluate the model's expansion around its pretrained weights.

    If the model has an attribute `core`, only this submodule is expanded.
    """

    takes_sharded: ClassVar[bool] = False

    def make_trainable(self, model: nn.Module, seed: int = 0) -> nn.Module:
        return self.make_evaluable(model)

    def make_evaluable(self, model: nn.Module) -> nn.Module:
        core = getattr(model, "core", None)
        if core is None:
            return Tangent(model)
        setattr(model, core, Tangent(model.get_submodule(core)))
        return model


def linearize(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """The expansion of a pretrained model, at the weights of a linearized expert or of a merge of such experts.

    Args:
        model: the pretrained base of the experts. It becomes part of the result.
        state: a checkpoint in the base's names.
    """
    expansion = Linearized().make_evaluable(model)
    expansion.load_state_dict(state)
    return expansion
