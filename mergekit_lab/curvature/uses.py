"""One use of a parameter in a model, and each sample's gradient of it.

Legend: N samples, L positions of a sample (1 where there are none), o, i a layer's outputs and inputs, *S the
shape of the parameter, g the gradient of the samples' summed log-likelihood at the use's output: as samples do
not mix, `g[n]` is sample n's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


class Use:
    """One use of a parameter."""

    def compute_gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """The gradients of samples `start … stop−1`, `[n, *S]`."""
        raise NotImplementedError

    def add_squares(self, total: Tensor) -> bool:
        """Add every sample's squared gradient to `total`, if that can be had without the gradients."""
        return False


@dataclass
class Ready(Use):
    """Gradients so small that they were computed at once, `[N, *S]`."""

    values: Tensor

    def compute_gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self.values[start:stop].to(dtype)


@dataclass
class MatrixProduct(Use):
    """`y = a Wᵀ`: the gradient is `Σ_l g_l a_lᵀ`, one product a sample.

    Args:
        a: inputs `[N, L, i]`.
        g: `[N, L, o]`.
        flipped: the parameter is `[i, o]` and `y = a W`.
    """

    a: Tensor
    g: Tensor
    flipped: bool = False

    def _fold_sides(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a, g = self.a[start:stop].to(dtype), self.g[start:stop].to(dtype)
        return (a, g) if self.flipped else (g, a)

    def compute_gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        rows, columns = self._fold_sides(start, stop, dtype)
        return torch.bmm(rows.mT, columns)

    def add_squares(self, total: Tensor) -> bool:
        if self.a.shape[1] != 1:
            return False
        rows, columns = self._fold_sides(0, len(self.a), total.dtype)
        total.addmm_(rows[:, 0].square().T, columns[:, 0].square())  # the square of a rank-one matrix is one
        return True


@dataclass
class Convolution(Use):
    """A 2-D convolution: the product of `g` `[N, o, L]` and its patches `[N, L, C·h·w]`.

    Args:
        x: inputs `[N, C, H, W]`.
        g: `[N, o, H', W']`.
        shape: of the kernel.
        options: of `unfold`.
    """

    x: Tensor
    g: Tensor
    shape: torch.Size
    options: dict[str, Any]

    def compute_gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        gradients = torch.bmm(
            self.g[start:stop].to(dtype).flatten(2), self._cut_patches(self.x[start:stop].to(dtype))
        )
        return gradients.view(-1, *self.shape)

    def _cut_patches(self, x: Tensor) -> Tensor:
        """`[n, L, C·h·w]`; tiles are cut by a view, as `unfold` goes sample by sample."""
        h, w = self.shape[2:]
        tiles = self.options == {"stride": (h, w), "padding": (0, 0), "dilation": (1, 1)}
        if not tiles or x.shape[2] % h or x.shape[3] % w:
            return functional.unfold(x, (h, w), **self.options).mT
        return x.unflatten(3, (-1, w)).unflatten(2, (-1, h)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


@dataclass
class Lookup(Use):
    """An embedding: row `v` gets the sum of `g` over the sample's positions that hold `v`.

    Args:
        index: `[N, L]`.
        g: `[N, L, D]`, zero where the index is the padding's.
        rows: of the table.
    """

    index: Tensor
    g: Tensor
    rows: int

    def compute_gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        count, width = stop - start, self.g.shape[-1]
        out = self.g.new_zeros(count * self.rows, width, dtype=dtype)
        out.index_add_(0, self._find_positions(start, stop), self.g[start:stop].to(dtype).flatten(0, 1))
        return out.view(count, self.rows, width)

    def _find_positions(self, start: int, stop: int) -> Tensor:
        offset = torch.arange(stop - start, device=self.index.device)[:, None] * self.rows
        return (self.index[start:stop] + offset).flatten()

    def add_squares(self, total: Tensor) -> bool:
        rows, inverse = self._find_positions(0, len(self.index)).unique(return_inverse=True)
        sums = total.new_zeros(len(rows), self.g.shape[-1])
        sums.index_add_(0, inverse, self.g.to(total.dtype).flatten(0, 1))
        total.index_add_(0, rows % self.rows, sums.square_())
        return True


@dataclass
class Local(Use):
    """Any function of one parameter (or of what was computed from parameters) and of batched tensors.

    Args:
        function: of the parameter and of tensors with one sample each, `[1, …]`; gives `[1, …]`.
        source: the parameter.
        batched: `[N, …]` each.
        g: `[N, …]`.
    """

    function: Callable[..., Tensor]
    source: Tensor
    batched: Sequence[Tensor]
    g: Tensor

    def compute_gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        def compute_one(g: Tensor, *tensors: Tensor) -> Tensor:
            pull = vjp(lambda s: self.function(s, *(t[None] for t in tensors)), self.source)[1]
            gradient: Tensor = pull(g[None])[0]
            return gradient

        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for vmap
            gradients: Tensor = vmap(compute_one)(self.g[start:stop], *(t[start:stop] for t in self.batched))
        return gradients.to(dtype)


@dataclass
class Derived(Use):
    """A use of what was computed from the parameter, pulled back to it sample by sample.

    Args:
        use: of the computed tensor.
        computed: that tensor, with its graph.
        parameter: what it was computed from.
    """

    use: Use
    computed: Tensor
    parameter: Tensor

    def compute_gradients(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        arrived = self.use.compute_gradients(start, stop, self.computed.dtype)
        if arrived.dim() == self.computed.dim():
            return torch.stack([self._differentiate_one(n, g) for n, g in enumerate(arrived, start)]).to(dtype)
        (gradients,) = torch.autograd.grad(
            self.computed, self.parameter, arrived, retain_graph=True, is_grads_batched=True
        )
        return gradients.to(dtype)

    def _differentiate_one(self, sample: int, g: Tensor) -> Tensor:
        """Where the computed tensor holds a part for each sample: from its own part alone."""
        arrived = torch.zeros_like(self.computed)
        arrived[sample] = g
        gradient: Tensor = torch.autograd.grad(self.computed, self.parameter, arrived, retain_graph=True)[0]
        return gradient
