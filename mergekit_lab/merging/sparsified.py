"""The bases of the methods that hand what they make of task vectors to an inner method, and of those that thin
them out.

Legend: `T` experts, `*S` a tensor's shape, `n` a flat block's length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging.blocks import cut_rows
from mergekit_lab.merging.contract import Blocks, Method, Segment, Site, Stream
from mergekit_lab.merging.task_arithmetic import TaskArithmetic
from mergekit_lab.ranges import require


@dataclass(frozen=True, kw_only=True)
class WrappingMethod(Method):
    """Base of the methods that hand what they make of task vectors to another one.

    Args:
        inner: the method that merges; coefficient, weights and side inputs are the inner method's.
        weights: None; they are given to the inner method.
    """

    inner: Method = field(default_factory=TaskArithmetic)

    without_weights = "give them to the inner method"
    stands_alone: ClassVar[bool] = False
    """Whether it cannot be another method's inner one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.inner, Method), "inner", self.inner, "a method")
        if isinstance(self.inner, WrappingMethod) and self.inner.stands_alone:
            within, outer = type(self.inner).__name__, type(self).__name__
            raise InputError(
                f"{within} cannot be the inner method of {outer}: make {outer} the inner method of {within}"
            )

    side_inputs = property(attrgetter("inner.side_inputs"))
    scale = property(attrgetter("inner.scale"))
    weights_by_tensor = property(attrgetter("inner.weights_by_tensor"))

    def with_coefficient(self, coefficient: float) -> Self:
        return replace(self, inner=self.inner.with_coefficient(coefficient))

    def weigh_experts(self, experts: Sequence[str], name: str = "") -> list[float]:
        return self.inner.weigh_experts(experts, name)

    def check(self, experts: Sequence[str]) -> None:
        super().check(experts)
        self.inner.check(experts)

    def name_side(self, kind: str, name: str) -> str | None:
        return self.inner.name_side(kind, name)

    def check_tensors(self, names: Sequence[str]) -> None:
        self.inner.check_tensors(names)


@dataclass(frozen=True, kw_only=True)
class SparsifiedMethod(WrappingMethod):
    """Thin out, then `inner`.

    A subclass has `sparsify`, for whole tensors. If that takes flat blocks too, it says `by_blocks`, and its
    `survey_sparsity` finds what a block cannot know of its tensor; if there is nothing, it says `by_entries`.
    """

    by_blocks: ClassVar[bool] = False
    by_entries: ClassVar[bool] = False
    """Whether blocks are thinned out without a look at their tensor."""

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return self.by_blocks and self.inner.elementwise

    by_matrix = property(attrgetter("inner.by_matrix"))

    @property
    def pools(self) -> bool:  # type: ignore[override]
        return self.by_entries and self.inner.pools

    def survey(self, stream: Stream) -> Any:
        """The inner method's; of task vectors only where entries are thinned out each for itself.

        Raises:
            InputError: it looks at task vectors, and blocks are no whole tensors.
        """

        def refuse(name: str, deltas: Tensor, site: Site) -> Tensor:
            raise InputError(
                f"{type(self).__name__} works tensor by tensor here and {type(self.inner).__name__} surveys "
                "the task vectors of the whole model: choose another inner method (TIES: preset='mergekit')"
            )

        return self.inner.survey(stream.map(self.sparsify if self.by_entries else refuse))

    def survey_sparsity(self, name: str, entries: int, blocks: Blocks) -> Any:
        """What `sparsify` has to know of a tensor; reaches it as `site.tensor`."""
        return None

    def survey_tensor(self, name: str, entries: int, blocks: Blocks) -> Any:
        sparsity = self.survey_sparsity(name, entries, blocks)

        def sparsify_blocks() -> Iterator[tuple[Tensor, Tensor, Site]]:
            for base, deltas, site in blocks():
                yield base, self.sparsify(name, deltas, replace(site, tensor=sparsity)), site

        return sparsity, self.inner.survey_tensor(name, entries, sparsify_blocks)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        if not self.elementwise:
            return self._merge_whole(name, base, deltas, site)
        sparsity, of_inner = site.tensor or (None, None)
        sparse = self.sparsify(name, deltas, replace(site, tensor=sparsity))
        return self.inner.merge(name, base, sparse, replace(site, tensor=of_inner))

    def _merge_whole(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        if self.by_blocks:
            flat = deltas.reshape(len(deltas), -1)
            sparsity = self.survey_sparsity(name, flat.shape[1], lambda: iter([(base.reshape(-1), flat, site)]))
            site = replace(site, tensor=sparsity)
            deltas = self.sparsify(name, flat, site).view_as(deltas)
        else:
            deltas = self.sparsify(name, deltas, site)
        if not self.inner.elementwise:
            return self.inner.merge(name, base, deltas, replace(site, tensor=None))
        return _merge_blocks(self.inner, name, base, deltas, site)

    def sparsify(self, name: str, deltas: Tensor, site: Site) -> Tensor:
        """The thinned task vectors, shaped like `deltas`: `[T, *S]`, or `[T, n]` of a block."""
        raise NotImplementedError


def _merge_blocks(method: Method, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
    """Merge a whole tensor by an elementwise method, block by block."""
    origin, flat = base.reshape(-1), deltas.reshape(len(deltas), -1)
    sides = {kind: values.reshape(len(values), -1) for kind, values in site.side.items()}

    def cut(tensor: Any = None) -> Iterator[tuple[Tensor, Tensor, Site]]:
        for part in cut_rows(len(origin), 1, flat.device):
            side = {kind: values[:, part] for kind, values in sides.items()}
            segments = (Segment(name, part.start, part.stop),)
            yield origin[part], flat[:, part], replace(site, segments=segments, side=side, tensor=tensor)

    surveyed = method.survey_tensor(name, len(origin), cut)
    merged = [method.merge(name, *block) for block in cut(surveyed)]
    return torch.cat(merged).view(base.shape)
