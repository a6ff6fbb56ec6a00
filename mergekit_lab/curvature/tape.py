"""Per-sample gradients of a model as it is: its functions are watched, not its modules.

Under `Tape`, a torch function mode, every call that takes a parameter runs on the parameter's detached value,
and a hook on the result hands over each sample's gradient once backward has passed. What needs one is known by
what enters the calls: tensors that depend on the samples are marked as they spread from the inputs, and what is
computed from parameters alone (a slice, a transpose, T5's position bias) is a source like a parameter.

The idea is that of BackPACK (Dangel et al. 2020) and of torch's `ExpandedWeight`. Functions in place of
modules serve a class token, a projection and Hugging Face's own norms alike, and no library is imported.

What is asked of a model: samples do not mix, dimension 0 of every activation that meets a parameter is the
sample (`nn.MultiheadAttention`'s inner layout is seen to). Where a shape says otherwise `NoRule` names the
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from mergekit_lab.curvature.attention import ATTENTION, attention
from mergekit_lab.curvature.rules import BROADCASTING, RULES, local_rule, tensors_in
from mergekit_lab.curvature.uses import Derived, Ready, Use

CACHE, BUDGET = 1 << 19, 1 << 26
"""Entries of per-sample gradients that are held at a time on a CPU and elsewhere, or one sample's where those
are more. Measured: more do not fit a core's cache, and less do not fill a GPU."""

_OUT_OF_PLACE = {Tensor.add_: Tensor.add, Tensor.mul_: Tensor.mul}  # and `+=`, `*=`
_RESHAPING = {Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten}


class NoRule(Exception):
    """Parameters whose per-sample gradients the tape cannot follow."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


class Tape(TorchFunctionMode):
    """Watch one forward pass; the backward pass after it adds squared gradients to `totals`.

    Args:
        parameters: what is differentiated, by name.
        totals: a tensor for each, which every sample's squared gradient is added to.
        samples: in the batch.

    Use: `mark` the inputs, run the model inside `with tape`, backward outside, then `finish`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], totals: Mapping[str, Tensor], samples: int) -> None:
        super().__init__()
        self.samples = samples
        self._parameters = parameters
        self._totals = totals
        self._sources: dict[int, tuple[Tensor, tuple[str, ...]]] = {
            id(p): (p, (name,)) for name, p in parameters.items()
        }
        self._own = {id(p) for p in parameters.values()}
        self._expected = dict.fromkeys(parameters, 0)
        self._arrived: dict[str, list[Use]] = {name: [] for name in parameters}
        self._handles: list[RemovableHandle] = []

    def mark(self, value: Any) -> None:
        """These tensors depend on the samples."""
        for tensor in tensors_in(value):
            tensor._per_sample = True  # type: ignore[attr-defined]

    def is_source(self, value: Any) -> bool:
        """Whether this is a parameter, or computed from parameters alone."""
        return id(value) in self._sources

    def is_batched(self, value: Any) -> bool:
        return getattr(value, "_per_sample", False)

    def is_aligned(self, value: Any) -> bool:
        """Whether dimension 0 is the samples."""
        return self.is_batched(value) and value.dim() > 0 and len(value) == self.samples

    def rows(self, tensor: Tensor) -> Tensor:
        """`[N, …, d]`, or `[N·L, d]` that was made of it, as `[N, L, d]`."""
        return tensor.reshape(self.samples, -1, tensor.shape[-1])

    def has_rows(self, value: Any) -> bool:
        return (self.is_aligned(value) and value.dim() > 1) or getattr(value, "_flattened", False)

    def _mark_flattened(self, tensor: Tensor) -> None:
        if tensor.dim() == 2 and len(tensor) != self.samples:
            tensor._flattened = True  # type: ignore[attr-defined]

    def plain(self, value: Any) -> Any:
        """A source's detached value; anything else as it is."""
        return value.detach() if self.is_source(value) else value

    def require(self, ok: bool, *sources: Any) -> None:
        """Give up on these sources unless `ok`."""
        if not ok:
            assert any(self.is_source(s) for s in sources)
            raise NoRule([n for s in sources if self.is_source(s) for n in self._sources[id(s)][1]])

    def watch(self, out: Tensor, *uses: tuple[Any, Callable[[Tensor], Use]]) -> Tensor:
        """`out`, with a hook that makes each source's use of the gradient that arrives there."""
        if not out.requires_grad:
            out = out.requires_grad_().clone()  # a model may change it in place, which a leaf forbids
        mine = [(self._sources[id(source)], make) for source, make in uses if self.is_source(source)]
        for (_, names), _ in mine:
            for name in names:
                self._expected[name] += 1

        def receive(g: Tensor) -> None:
            for (source, names), make in mine:
                use = make(g)
                for name in names:
                    p = self._parameters[name]
                    self._arrive(name, use if source is p else Derived(use, source, p))
            mine.clear()  # lets go of the activations, which the graph would keep

        self._handles.append(out.register_hook(receive))
        return out

    def parted(self, values: Tensor, use: tuple[Any, Callable[[Tensor], Use]]) -> Tensor:
        """A tensor that holds each sample's own copy of a source, from here on like an activation."""
        out = self.watch(values.detach(), use)
        self.mark(out)
        return out

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in(*args, *kwargs.values())
        sources = [t for t in tensors if id(t) in self._sources]
        batched = any(getattr(t, "_per_sample", False) for t in tensors)
        if not sources or not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            if batched:
                self.mark(args[0] if func is Tensor.__setitem__ else out)
                if func in _RESHAPING and self.is_aligned(args[0]) and out.shape[-1] == args[0].shape[-1]:
                    self._mark_flattened(out)
            return out
        if not batched:
            return self._from_parameters(func, args, kwargs, sources)
        if func in _OUT_OF_PLACE:
            return self._in_place(_OUT_OF_PLACE[func], args, kwargs)
        name = getattr(func, "__name__", "")
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        self.require(not in_place, *sources)
        if func is ATTENTION:
            try:
                with self:
                    return attention(*args, **kwargs)
            except NotImplementedError:
                self.require(False, *sources)
        if func in BROADCASTING:
            args = [self._per_sample(a, args) for a in args]
            if not any(self.is_source(t) for t in args):
                with self:
                    return func(*args, **kwargs)
        out = RULES.get(func, local_rule(func))(self, *args, **kwargs)
        self.mark(out)
        return out

    def _in_place(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The result of `func`, written over its first argument."""
        target: Tensor = args[0]
        self.require(not self.is_source(target), *args)
        with self:
            return target.copy_(func(target.clone(), *args[1:], **kwargs))

    def _per_sample(self, value: Any, args: Sequence[Any]) -> Any:
        """What was computed from parameters for every sample (the segments of BERT) becomes an activation."""
        if not self.is_source(value) or id(value) in self._own or self.samples == 1:
            return value
        if value.dim() < max(a.dim() for a in args if isinstance(a, Tensor)) or len(value) != self.samples:
            return value
        return self.parted(value, (value, Ready))

    def _from_parameters(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sources: Sequence[Tensor]
    ) -> Any:
        """A result that depends on no sample is a source, unless it is what gives each sample its copy."""
        out = func(*args, **kwargs)
        if func is Tensor.expand and self._is_copied(args[0], out):
            source = args[0]
            return self.parted(out, (source, lambda g: Ready(_as_shape(g[:, None], source.shape))))
        names = tuple(dict.fromkeys(name for s in sources for name in self._sources[id(s)][1]))
        for tensor in tensors_in(out):
            if tensor.requires_grad and not self.is_source(tensor):
                self._sources[id(tensor)] = (tensor, names)
        return out

    def _is_copied(self, source: Tensor, out: Tensor) -> bool:
        """Whether this is what gives each sample its copy: `[1, *S]`, or a class token `[d]` as `[N, 1, d]`."""
        if len(out) != self.samples:
            return False
        if source.dim() == out.dim():
            return source.shape[0] == 1
        return source.dim() == 1 and out.dim() == 3 and out.shape[1] == 1

    def _arrive(self, name: str, use: Use) -> None:
        self._arrived[name].append(use)
        if len(self._arrived[name]) == self._expected[name]:
            self._settle(name)

    def _settle(self, name: str) -> None:
        """Add the squares of the gradients, summed over the uses of one parameter."""
        uses, total = self._arrived[name], self._totals[name]
        self._arrived[name] = []
        if len(uses) == 1 and uses[0].add_squares(total):
            return
        step = max(1, (CACHE if total.device.type == "cpu" else BUDGET) // max(1, total.numel()))
        for start in range(0, self.samples, step):
            stop = min(start + step, self.samples)
            gradients = uses[0].gradients(start, stop, total.dtype)
            for use in uses[1:]:
                gradients = gradients + use.gradients(start, stop, total.dtype)
            if gradients.is_cuda:
                norms = torch.linalg.vector_norm(gradients, dim=0)  # one pass, which CPUs do slowly
                total.addcmul_(norms, norms)
            else:
                for gradient in gradients:
                    total.addcmul_(gradient, gradient)

    def unused(self) -> list[str]:
        """Parameters that no function took."""
        return [name for name, uses in self._expected.items() if not uses]

    def finish(self) -> None:
        """Settle what had a use that the log-likelihood does not depend on."""
        for handle in self._handles:
            handle.remove()
        for name in [name for name, uses in self._arrived.items() if uses]:
            self._settle(name)


def _as_shape(gradients: Tensor, shape: Sequence[int]) -> Tensor:
    """`[N, *T]` summed over the dimensions in which `*shape` was expanded to `*T`: `[N, *shape]`."""
    new = gradients.dim() - 1 - len(shape)
    gradients = gradients.sum(dim=list(range(1, 1 + new))) if new else gradients
    spread = [d + 1 for d, size in enumerate(shape) if gradients.shape[d + 1] != size]
    return gradients.sum(dim=spread, keepdim=True) if spread else gradients
