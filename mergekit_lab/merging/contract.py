"""What a merging method is.

A method is a frozen dataclass whose fields are its hyper-parameters. It never sees a whole model: the
driver (`stream.py`) hands it one tensor, or one flat block of a tensor, of all experts at a time.

Legend, here and in every method: `T` experts, `*S` a tensor's shape, `θ0` the base, `θ_t` an expert,
`δ_t = θ_t − θ0` its task vector, `λ_t` its weight, `α` the global coefficient.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy
from torch import Tensor

from mergekit_lab.errors import InputError, join_names, suggest
from mergekit_lab.ranges import FLOAT32_MAX, check_settings, require


class Segment(NamedTuple):
    """A flat range of a tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Site:
    """The part of the model that a call of `merge` gets, with everything that belongs to it.

    Attributes:
        experts: the experts' names, in the order of dimension 0 of the task vectors.
        weights: `λ`, shape `[T]`.
        segments: what the call gets, end to end: the whole tensor, or the ranges of a block.
        side: side inputs of this tensor, by kind (`"fisher"`), each `[T, …]`; shaped like the task vectors
            where the side input has the tensor's own name (see `Method.name_side`).
        survey: what the method's own `survey` returned.
        tensor: what the method's own `survey_tensor` returned for this tensor.
        note: keeps a diagnostic of this tensor, `note("eta", 0.1)`.
        unit: whether every weight is 1, known without waiting for the device.
        transposed: whether the tensor is a weight stored as [in, out], as in GPT-2's Conv1D.
    """

    experts: tuple[str, ...]
    weights: Tensor
    segments: tuple[Segment, ...] = ()
    side: Mapping[str, Tensor] = field(default_factory=dict)
    survey: Any = None
    tensor: Any = None
    note: Callable[[str, object], None] = lambda key, value: None
    unit: bool = False
    transposed: bool = False

    @property
    def offset(self) -> int:
        """Flat index, within the tensor, of the first entry handed over."""
        return self.segments[0].start

    def weigh(self, deltas: Tensor) -> Tensor:
        """Multiply by the weights: `λ_t δ_t`, shaped like `deltas` `[T, …]`. If every weight is 1, returns the
        input.
        """
        if self.unit:
            return deltas
        return deltas * self.weights.view(-1, *[1] * (deltas.dim() - 1))

    def orient(self, weights: Tensor) -> Tensor:
        """View stored weights as `[…, out, in]`, and back."""
        return weights.mT if self.transposed else weights


Blocks = Callable[[], Iterator[tuple[Tensor, Tensor, Site]]]


class Stream(Protocol):
    """What a survey pass sees of the model: its floating-point tensors, in flat blocks.

    Attributes:
        experts: the experts' names.
        names: the tensors', in order.
        entries: number of floating-point entries of these tensors, 0-d ones included; weights that are
            tied count once.
        buffer_entries: number of integer and boolean entries.
    """

    @property
    def experts(self) -> tuple[str, ...]: ...

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def entries(self) -> int: ...

    @property
    def buffer_entries(self) -> int: ...

    def read_blocks(self) -> Iterator[tuple[str, Tensor, Site]]:
        """Name, task vectors `[T, n]` and site of every block; `n`, and whether tensors are pooled, is the
        driver's choice (see `Method.pools`). A block is valid until the next one is asked for."""

    def read_side_blocks(self, kind: str) -> Iterator[Tensor]:
        """The side inputs of one kind, `[T, n]` a block."""

    def map(self, change: Callable[[str, Tensor, Site], Tensor]) -> Self:
        """The same stream with every block of task vectors changed."""

    def select(self, keep: Callable[[str, Sequence[int]], bool]) -> Self:
        """This stream, restricted to tensors whose name and shape `keep` accepts; of a stack of a mixture's
        experts those of its first matrix.
        """

    def divide(self) -> Sequence[Self]:
        """This stream cut into some for `run_at_once`, by tensors: one for each device that takes part, a few
        on a CPU. For surveys whose result does not depend on the order of blocks, as counts do not and sums of
        rounded numbers do."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods.

    Args:
        weights: `λ_t`, one per expert: a sequence in the experts' order, or a mapping by name. Each may be a
            mapping from tensor-name pattern (`"*.mlp.*"`) to number; the first match counts. Without weights
            or a match, `default_weight` counts.
    """

    weights: Sequence[float | Mapping[str, float]] | Mapping[str, float | Mapping[str, float]] | None = None

    side_inputs: ClassVar[tuple[str, ...]] = ()
    """The kinds of side inputs that `merge` reads from `site.side`, such as "fisher". A run makes "fisher" and
    "gram"."""
    elementwise: ClassVar[bool] = False
    """Whether `merge` takes flat blocks: an entry of the result depends only on that entry of the inputs and on
    the site."""
    pools: ClassVar[bool] = False
    """Whether a block may hold entries of several tensors (`site.segments`). `name` and `site.tensor` are then
    meaningless."""
    propagates: ClassVar[bool] = False
    """For elementwise methods: whether NaN or infinity in any task vector always shows in the result. The
    driver then checks only the result."""
    by_matrix: ClassVar[bool] = False
    """Whether `merge` takes the matrices of a mixture's experts one by one where a tensor stacks them (see
    `stacks`); of a method that is not elementwise."""
    by_task: ClassVar[bool] = False
    """Whether it makes a model per task, as `merge_factors` stores them. `merge` returns one for all tasks."""
    default_weight: ClassVar[float] = 1.0
    """`λ_t` where `weights` is None."""
    signed: ClassVar[bool] = True
    """Whether weights may be negative, or all 0."""
    fewest: ClassVar[int] = 1
    most: ClassVar[int | None] = None
    """How many experts it takes; None: any number."""
    without_weights: ClassVar[str] = ""
    """Why `weights` must be None; empty where it may not be."""

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:
        """Check the settings by the types of their fields, before they are used.

        Raises:
            InputError: a setting of another type, or out of its range.
        """
        cls._check_values(settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Keep numpy's numbers as Python's. Extend it by `super()`."""
        for name, value in vars(self).items():
            if isinstance(value, numpy.generic) or type(value) in (list, tuple, dict):
                object.__setattr__(self, name, _to_python(value))

    @classmethod
    def _check_values(cls, settings: Mapping[str, Any]) -> None:
        check_settings(cls, {name: _to_python(value) for name, value in settings.items()})
        weights = settings.get("weights")
        require(weights is None or not cls.without_weights, "weights", weights, f"None: {cls.without_weights}")

    @property
    def scale(self) -> float:
        """`α`: the driver multiplies the result of `merge` by it."""
        return 1.0

    def with_coefficient(self, coefficient: float) -> Self:
        """This method at another global coefficient.

        Raises:
            InputError: the method has none.
        """
        raise InputError(f"{type(self).__name__} has no coefficient to set")

    def weigh_experts(self, experts: Sequence[str], name: str = "") -> list[float]:
        """`λ_t` of the tensor `name` for these experts, in their order.

        Raises:
            InputError: too many or too few, of experts or of weights; or a name that is no expert.
        """
        self._check_number(len(experts))
        default = self.default_weight
        if self.weights is None:
            return [default] * len(experts)
        if isinstance(self.weights, Mapping):
            by_name = {str(expert): value for expert, value in self.weights.items()}
            for expert in by_name:
                if expert not in experts:
                    raise InputError(
                        f"weights name {expert!r}, which is not an expert{suggest(expert, experts)}"
                    )
            missing = set(experts) - set(by_name)
            if missing:
                raise InputError(f"weights lack a number for {join_names(missing)}")
            values = [by_name[expert] for expert in experts]
        else:
            values = list(self.weights)
        if len(values) != len(experts):
            raise InputError(f"{len(values)} weights were given for {len(experts)} experts")
        numbers = [
            _match(value, name, default) if isinstance(value, Mapping) else float(value) for value in values
        ]
        require(all(map(is_finite, numbers)), "weights", self.weights, "finite in float32")
        fit = self.signed or min(numbers) >= 0 < max(numbers)
        require(fit, "weights", self.weights, "at least 0, and not all 0")
        return numbers

    def _check_number(self, experts: int) -> None:
        bound = self.fewest if experts < self.fewest else self.most or experts
        if not self.fewest <= experts <= bound:
            how = "exactly" if self.fewest == self.most else "at least" if experts < bound else "at most"
            what = {1: "one expert", 2: "two experts"}.get(bound, f"{bound} experts")
            raise InputError(f"{type(self).__name__} takes {how} {what}, not {experts}")

    def check(self, experts: Sequence[str]) -> None:
        """Raise `InputError` before any work for settings out of range, however they were set, and for experts
        that it cannot merge. Extend it by `super()`.
        """
        self._check_values(vars(self))
        for setting in fields(self):
            value = getattr(self, setting.name)
            finite = not isinstance(value, int | float) or is_finite(value)
            require(finite, setting.name, value, "finite in float32")
        self._check_number(len(experts))
        self.weigh_experts(experts)

    def check_tensors(self, names: Sequence[str]) -> None:
        """Raise `InputError` before any work for a model that the method cannot merge, by its merged tensors'
        names.

        Raises:
            InputError: a pattern of `weights` matches none of them; methods add their own reasons.
        """
        for patterns in self._list_weights():
            for pattern in patterns if isinstance(patterns, Mapping) else ():
                require(
                    any(fnmatchcase(name, pattern) for name in names),
                    "a pattern of weights", pattern, "one that matches a tensor that is merged",
                )  # fmt: skip

    def _list_weights(self) -> Iterable[Any]:
        return self.weights.values() if isinstance(self.weights, Mapping) else self.weights or ()

    @property
    def weights_by_tensor(self) -> bool:
        """Whether `λ` differs between tensors."""
        return any(isinstance(value, Mapping) for value in self._list_weights())

    def name_side(self, kind: str, name: str) -> str | None:
        """A tensor's name in side inputs of this kind, or None if they lack it.

        Under the tensor's own name, a side input must have it, in the tensor's shape. Under another name it may
        be missing: `site.side` then has no entry.
        """
        return name

    def survey(self, stream: Stream) -> Any:
        """Make an optional first pass over the model. `merge` gets the result as `site.survey`."""
        return None

    def survey_tensor(self, name: str, entries: int, blocks: Blocks) -> Any:
        """Make an optional first pass over one tensor, for elementwise methods. `merge` gets the result as
        `site.tensor`.

        Args:
            name: the tensor's name.
            entries: its number of entries.
            blocks: starts a pass over its `θ0` `[n]`, task vectors `[T, n]` and sites, in order. Each is valid
                until the next one is taken.
        """
        return None

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        """The merged task vector at `α = 1`.

        Args:
            name: the tensor's name.
            base: `θ0`, shape `[*S]`, or a flat block `[n]` of it for elementwise methods.
            deltas: `δ`, shape `[T, *S]` or `[T, n]`; float32, or float64 if the model is.
            site: the rest.

        Returns:
            A tensor shaped like `base`, in the dtype of `deltas`. Inputs are not changed.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ScaledMethod(Method):
    """A method with a global coefficient `α`: `θ = θ0 + α·merge(δ)`.

    Args:
        coefficient: `α`, any finite number; negative values move away from the experts (forgetting).
    """

    coefficient: float = 1.0

    @property
    def scale(self) -> float:
        return self.coefficient

    def with_coefficient(self, coefficient: float) -> Self:
        return replace(self, coefficient=coefficient)


def is_finite(value: float) -> bool:
    """Whether a number is one in float32, too, in which most merges are computed."""
    return abs(value) <= FLOAT32_MAX


def _to_python(value: Any, numbers: Any = numpy.generic) -> Any:
    """Numbers of numpy as Python's; within lists and mappings those of torch, too."""
    within = numpy.generic | Tensor
    if isinstance(value, Mapping):
        return {key: _to_python(item, within) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(_to_python(item, within) for item in value)
    return value.item() if isinstance(value, numbers) and value.ndim == 0 else value


def _match(patterns: Mapping[str, float], name: str, default: float) -> float:
    return next((float(v) for pattern, v in patterns.items() if fnmatchcase(name, pattern)), default)
