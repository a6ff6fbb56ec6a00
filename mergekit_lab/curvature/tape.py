"""Records a forward pass for per-sample gradients: where samples are, and which parameters need gradients.

Tensors that depend on the samples are marked. What is computed from parameters alone (a slice, a transpose,
T5's position bias) is a source like a parameter. A hook on the result of each call that takes a source hands
over each sample's gradient once backward has passed. `recorder.py` fills a tape; `rules.py` says what a call
hands over.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mergekit_lab.curvature.uses import Derived, Use

CACHE, BUDGET = 1 << 19, 1 << 26
"""Entries of per-sample gradients that are held at a time on a CPU and elsewhere, or one sample's where those
are more. Measured: more do not fit a core's cache, and less do not fill a GPU."""


class NoRule(Exception):
    """Parameters whose per-sample gradients the tape cannot follow."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


class Tape:
    """One forward pass; the backward pass after it adds squared gradients to `totals`.

    Args:
        parameters: what is differentiated, by name.
        totals: a tensor for each, which every sample's squared gradient is added to.
        samples: in the batch.

    Use: `mark` the inputs, run the model inside `with Recorder(tape)`, backward outside, then `finish`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], totals: Mapping[str, Tensor], samples: int) -> None:
        self.samples = samples
        self._parameters = parameters
        self._totals = totals
        self._sources: dict[int, tuple[Tensor, tuple[str, ...]]] = {
            id(p): (p, (name,)) for name, p in parameters.items()
        }
        self._expected = dict.fromkeys(parameters, 0)
        self._arrived: dict[str, list[Use]] = {name: [] for name in parameters}
        self._handles: list[RemovableHandle] = []

    def mark(self, value: Any) -> None:
        """These tensors depend on the samples."""
        for tensor in find_tensors(value):
            tensor._per_sample = True  # type: ignore[attr-defined]

    def is_source(self, value: Any) -> bool:
        """Whether this is a parameter, or computed only from parameters."""
        return id(value) in self._sources

    def list_names(self, *sources: Any) -> tuple[str, ...]:
        """The parameters that sources are, or were computed from."""
        known = (self._sources[id(s)][1] for s in sources if self.is_source(s))
        return tuple(dict.fromkeys(name for names in known for name in names))

    def add_source(self, tensor: Tensor, names: tuple[str, ...]) -> None:
        """Register a tensor that was computed only from these parameters."""
        self._sources[id(tensor)] = (tensor, names)

    def is_batched(self, value: Any) -> bool:
        return getattr(value, "_per_sample", False)

    def is_aligned(self, value: Any) -> bool:
        """Whether dimension 0 is the samples."""
        return self.is_batched(value) and value.dim() > 0 and len(value) == self.samples

    def view_rows(self, tensor: Tensor) -> Tensor:
        """`[N, …, d]`, or `[N·L, d]` that was made of it, as `[N, L, d]`."""
        return tensor.reshape(self.samples, -1, tensor.shape[-1])

    def has_rows(self, value: Any) -> bool:
        return (self.is_aligned(value) and value.dim() > 1) or getattr(value, "_flattened", False)

    def mark_flattened(self, tensor: Tensor) -> None:
        if tensor.dim() == 2 and len(tensor) != self.samples:
            tensor._flattened = True  # type: ignore[attr-defined]

    def detach(self, value: Any) -> Any:
        """A source's detached value; anything else as it is."""
        return value.detach() if self.is_source(value) else value

    def require(self, ok: bool, *sources: Any) -> None:
        """Give up on these sources unless `ok`."""
        if not ok:
            assert any(self.is_source(s) for s in sources)
            raise NoRule(self.list_names(*sources))

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
                    self._add_use(name, use if source is p else Derived(use, source, p))
            mine.clear()  # lets go of the activations, which the graph would keep

        self._handles.append(out.register_hook(receive))
        return out

    def separate(self, values: Tensor, use: tuple[Any, Callable[[Tensor], Use]]) -> Tensor:
        """A tensor that holds each sample's own copy of a source, from here on like an activation."""
        out = self.watch(values.detach(), use)
        self.mark(out)
        return out

    def _add_use(self, name: str, use: Use) -> None:
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
            gradients = uses[0].compute_gradients(start, stop, total.dtype)
            for use in uses[1:]:
                gradients = gradients + use.compute_gradients(start, stop, total.dtype)
            if gradients.is_cuda:
                norms = torch.linalg.vector_norm(gradients, dim=0)  # one pass, which CPUs do slowly
                total.addcmul_(norms, norms)
            else:
                for gradient in gradients:
                    total.addcmul_(gradient, gradient)

    def list_unused(self) -> list[str]:
        """Parameters that no function took."""
        return [name for name, uses in self._expected.items() if not uses]

    def finish(self) -> None:
        """Settle what had a use that the log-likelihood does not depend on."""
        for handle in self._handles:
            handle.remove()
        for name in [name for name, uses in self._arrived.items() if uses]:
            self._settle(name)


def find_tensors(*values: Any) -> list[Tensor]:
    """The tensors among these values and in their tuples, lists and mappings."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, Mapping):
            tensors += find_tensors(*value.values())
        elif isinstance(value, tuple | list):
            tensors += find_tensors(*value)
    return tensors
