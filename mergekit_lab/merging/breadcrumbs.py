"""Model Breadcrumbs: drop the largest and the smallest entries of every task vector, tensor by tensor.

Davari & Belilovsky 2024, "Model Breadcrumbs", section 3: of each layer's magnitudes both tails are masked,
outliers and negligible changes, and the rest is summed as in task arithmetic. The paper names the quantiles
between which entries stay, β and γ; arcee-ai/mergekit names the share that stays (`density`, γ − β) and the
share dropped at the top (`gamma`, 1 − γ), and its arithmetic runs here. Of equal magnitudes the lowest flat
index counts as the largest; mergekit's order there is unspecified. Its `breadcrumbs_ties` is
`inner=TIES(preset="mergekit", density=1.0)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.blocks import block_entries
from mergekit_lab.merging.contract import Method, Segment, Site, Stream, require
from mergekit_lab.merging.selection import keep_largest
from mergekit_lab.merging.task_arithmetic import TaskArithmetic


@dataclass(frozen=True, kw_only=True)
class SparsifiedMethod(Method):
    """Base of the methods that thin out each task vector, tensor by tensor, and merge what is left.

    Args:
        inner: the method that merges; coefficient, weights and side inputs are the inner method's.
        weights: None; they are given to the inner method.
    """

    inner: Method = field(default_factory=TaskArithmetic)

    def __post_init__(self) -> None:
        require(self.weights is None, "weights", self.weights, "None: give them to the inner method")

    @property
    def side_inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.side_inputs

    def side_name(self, kind: str, name: str) -> str | None:
        return self.inner.side_name(kind, name)

    @property
    def weights_by_tensor(self) -> bool:
        return self.inner.weights_by_tensor

    @property
    def scale(self) -> float:
        return self.inner.scale

    def at(self, coefficient: float) -> Self:
        return replace(self, inner=self.inner.at(coefficient))

    def expert_weights(self, experts: Sequence[str], name: str = "") -> list[float]:
        return self.inner.expert_weights(experts, name)

    def check_tensors(self, names: Sequence[str]) -> None:
        self.inner.check_tensors(names)

    def survey(self, stream: Stream) -> Any:
        """The inner method's, as long as it looks at no task vectors: blocks are no whole tensors.

        Raises:
            InputError: it does.
        """

        def refuse(name: str, deltas: Tensor, site: Site) -> Tensor:
            raise InputError(
                f"{type(self).__name__} works tensor by tensor and {type(self.inner).__name__} surveys the "
                "task vectors of the whole model: choose another inner method (TIES: preset='mergekit')"
            )

        return self.inner.survey(stream.map(refuse))

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        thin = self.sparsify(name, deltas, site)
        if not self.inner.elementwise:
            return self.inner.merge(name, base, thin, site)
        flat = thin.reshape(len(thin), -1)
        side = {kind: values.reshape(len(values), -1) for kind, values in site.side.items()}
        block = block_entries(flat.device)
        parts = [slice(start, start + block) for start in range(0, flat.shape[1], block)]

        def at(part: slice, tensor: Any = None) -> Site:
            segment = Segment(name, part.start, min(part.stop, flat.shape[1]))
            here = {kind: values[:, part] for kind, values in side.items()}
            return replace(site, segments=(segment,), side=here, tensor=tensor)

        found = self.inner.survey_tensor(
            name, base.numel(), lambda: ((flat[:, part], at(part)) for part in parts)
        )
        merged = [
            self.inner.merge(name, base.reshape(-1)[part], flat[:, part], at(part, found)) for part in parts
        ]
        return torch.cat(merged).view(base.shape)

    def sparsify(self, name: str, deltas: Tensor, site: Site) -> Tensor:
        """The thinned task vectors `[T, *S]` of one tensor."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Breadcrumbs(SparsifiedMethod):
    """Keep the middle of each tensor's magnitudes, then `inner`.

    Args:
        density: share of entries that stay, in (0, 1]; 1 is the inner method.
        gamma: share of entries dropped at the top, in [0, 1), rounded down; less where `density` leaves no
            room for it. 0 is trimming by magnitude.
        inner: the method that merges what is left, task arithmetic by default.
    """

    density: float = 0.1
    gamma: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        require(0 <= self.gamma < 1, "gamma", self.gamma, "in [0, 1)")

    def sparsify(self, name: str, deltas: Tensor, site: Site) -> Tensor:
        return keep_middle(deltas, self.density, self.gamma)


def keep_middle(deltas: Tensor, density: float, gamma: float) -> Tensor:
    """Of each `δ_t` drop the `int(gamma·n)` largest entries and keep the next `int(density·n)`.

    Args:
        deltas: `[T, *S]`.
        density: in (0, 1].
        gamma: in [0, 1).
    """
    entries = deltas[0].numel()
    kept = int(density * entries)
    upto = min(entries, kept + int(gamma * entries))
    return keep_largest(deltas, upto).sub_(keep_largest(deltas, upto - kept))
