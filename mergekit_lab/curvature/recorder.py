"""Per-sample gradients of a model as it is: its functions are watched, not its modules.

Under `Recorder`, a torch function mode, every call that takes a parameter runs on the parameter's detached
value, and the tape notes what the call hands over once backward has passed.

The idea is that of BackPACK (Dangel et al. 2020) and of torch's `ExpandedWeight`. Watching functions rather
than modules also covers a class token, a projection and Hugging Face's own norms, and needs no other library.

A model must not mix samples, and dimension 0 of every activation that meets a parameter must be the sample (the
inner layout of `nn.MultiheadAttention` is handled). If a shape says otherwise, `NoRule` names the parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mergekit_lab.curvature.attention import ATTENTION, run_attention
from mergekit_lab.curvature.rules import BROADCASTING, RULES, make_local_rule
from mergekit_lab.curvature.tape import Tape, find_tensors
from mergekit_lab.curvature.uses import Ready

_OUT_OF_PLACE = {Tensor.add_: Tensor.add, Tensor.mul_: Tensor.mul}  # and `+=`, `*=`
_RESHAPING = {Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten}


class Recorder(TorchFunctionMode):
    """Watch one forward pass, and note on the tape which parameter needs the gradient of which result."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = find_tensors(*args, *kwargs.values())
        sources = [t for t in tensors if self.tape.is_source(t)]
        batched = any(self.tape.is_batched(t) for t in tensors)
        if not sources or not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            if batched:
                self.tape.mark(args[0] if func is Tensor.__setitem__ else out)
                if func in _RESHAPING and self.tape.is_aligned(args[0]) and out.shape[-1] == args[0].shape[-1]:
                    self.tape.mark_flattened(out)
            return out
        if not batched:
            return self._compute_from_parameters(func, args, kwargs, sources)
        if func in _OUT_OF_PLACE:
            return self._write_in_place(_OUT_OF_PLACE[func], args, kwargs)
        name = getattr(func, "__name__", "")
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        self.tape.require(not in_place, *sources)
        if func is ATTENTION:
            try:
                with self:
                    return run_attention(*args, **kwargs)
            except NotImplementedError:
                self.tape.require(False, *sources)
        if func in BROADCASTING:
            args = [self._split_by_sample(a, args) for a in args]
            if not any(self.tape.is_source(t) for t in args):
                with self:
                    return func(*args, **kwargs)
        out = RULES.get(func, make_local_rule(func))(self.tape, *args, **kwargs)
        self.tape.mark(out)
        return out

    def _write_in_place(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The result of `func`, written over its first argument."""
        target: Tensor = args[0]
        self.tape.require(not self.tape.is_source(target), *args)
        with self:
            return target.copy_(func(target.clone(), *args[1:], **kwargs))

    def _split_by_sample(self, value: Any, args: Sequence[Any]) -> Any:
        """If parameters gave one value per sample (the segments of BERT), make it an activation."""
        if not self.tape.is_source(value) or isinstance(value, nn.Parameter) or self.tape.samples == 1:
            return value
        if value.dim() < max(a.dim() for a in args if isinstance(a, Tensor)) or len(value) != self.tape.samples:
            return value
        return self.tape.separate(value, (value, Ready))

    def _compute_from_parameters(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sources: Sequence[Tensor]
    ) -> Any:
        """Run a function of parameters alone. Its result is a source, unless it gives each sample a copy."""
        out = func(*args, **kwargs)
        if func is Tensor.expand and self._is_copied(args[0], out):
            source = args[0]
            return self.tape.separate(out, (source, lambda g: Ready(_to_shape(g[:, None], source.shape))))
        names = self.tape.list_names(*sources)
        for tensor in find_tensors(out):
            if tensor.requires_grad and not self.tape.is_source(tensor):
                self.tape.add_source(tensor, names)
        return out

    def _is_copied(self, source: Tensor, out: Tensor) -> bool:
        """Whether `out` gives each sample a copy: of `[1, *S]`, or of a class token `[d]` as `[N, 1, d]`."""
        if len(out) != self.tape.samples:
            return False
        if source.dim() == out.dim():
            return source.shape[0] == 1
        return source.dim() == 1 and out.dim() == 3 and out.shape[1] == 1


def _to_shape(gradients: Tensor, shape: Sequence[int]) -> Tensor:
    """`[N, *T]` summed over the dimensions in which `*shape` was expanded to `*T`: `[N, *shape]`."""
    new = gradients.dim() - 1 - len(shape)
    gradients = gradients.sum(dim=list(range(1, 1 + new))) if new else gradients
    spread = [d + 1 for d, size in enumerate(shape) if gradients.shape[d + 1] != size]
    return gradients.sum(dim=spread, keepdim=True) if spread else gradients
