"""Open and check the inputs of a merge. Everything that can be wrong is found here, before any arithmetic."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.checkpoints import (
    Checkpoint,
    TensorSpec,
    align,
    list_mismatches,
    open_checkpoint,
    refuse_quantized,
)
from mergekit_lab.checkpoints.adapter_layout import find_conv1d_weights
from mergekit_lab.errors import InputError, join_names, suggest
from mergekit_lab.merging.contract import Method
from mergekit_lab.merging.stacks import Stack, find_stacks
from mergekit_lab.ranges import require_choice

Source = Checkpoint | Mapping[str, Tensor] | str | Path
Sources = Mapping[str, Source] | Sequence[Source]
_KINDS = ("fisher", "gram")


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of one merge.

    Attributes:
        base: `θ0`.
        experts: `θ_t` by name, in order.
        side: side inputs by kind, in the experts' order.
        name_side: see `Method.name_side`.
        tied: names that are another name for the same weights, each with the first.
        merged: the tensors that are merged, in the base's order: floating-point ones, tied ones once.
        transposed: the weights that are stored as [in, out].
        stacks: the tensors that hold the matrices of a mixture's experts.
        compute: the dtype of the arithmetic.
        computed: whether tensors are made by factorizations when they are asked for: one at a time, and none
            is kept.
    """

    base: Checkpoint
    experts: Mapping[str, Checkpoint]
    side: Mapping[str, tuple[Checkpoint, ...]]
    name_side: Callable[[str, str], str | None]
    tied: Mapping[str, str]
    merged: tuple[str, ...]
    transposed: frozenset[str]
    stacks: Mapping[str, Stack]
    compute: torch.dtype
    computed: bool = False

    @cached_property
    def home(self) -> torch.device | None:
        """Where the tensors lie; None if none is merged."""
        return next((self.base[name].device for name in self.merged), None)

    def read_sides(self, name: str) -> dict[str, list[Tensor]]:
        """The side inputs of one tensor, by kind, one an expert."""
        sides = {}
        for kind, checkpoints in self.side.items():
            key = self.name_side(kind, name)
            if key is not None and all(key in checkpoint for checkpoint in checkpoints):
                sides[kind] = [checkpoint[key] for checkpoint in checkpoints]
        return sides

    def refuse_non_finite(self, names: Iterable[str]) -> None:
        """Raise for the first NaN or infinity in these tensors, naming tensor and checkpoint."""
        for name in names:
            for checkpoint in (self.base, *self.experts.values()):
                bad = int((~checkpoint[name].to(self.compute).isfinite()).sum())
                if bad:
                    raise InputError(
                        f"tensor {name!r} of {checkpoint.label} holds {bad} NaN or infinite entries: "
                        "its training diverged or the file is damaged"
                    )
        raise InputError(f"merging {join_names(names)} overflows {self.compute}")

    def refuse_side(self, kind: str, names: Sequence[str]) -> None:
        """Raise for the first side input of these tensors that may not be used, naming the expert."""
        for position, expert in enumerate(self.experts):
            for name in names:
                values = self.read_sides(name)[kind][position].to(self.compute)
                finite = bool(values.isfinite().all())
                if not finite or (kind == "fisher" and bool((values < 0).any())):
                    fault = "negative" if finite else "NaN or infinite"
                    raise InputError(f"the {kind} of {expert} holds {fault} entries in ({join_names([name])})")


def open_inputs(
    base: Source,
    experts: Sources,
    method: Method,
    statistics: Mapping[str, Sources] | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    buffers: str = "merge",
) -> Inputs:
    """Open base, experts and side inputs, and check that they belong together.

    Raises:
        InputError: see `merge_state_dicts`.
    """
    origin = open_checkpoint(base, "the base")
    named = name_sources(experts, "experts")
    _require_sources(named, "experts")
    opened = {name: open_checkpoint(source, name) for name, source in named.items()}
    if not opened:
        raise InputError("there is nothing to merge: no expert was given")
    for checkpoint in (origin, *opened.values()):
        refuse_quantized(checkpoint)
    tied = origin.find_ties()
    merged = select_tensors(origin.specs, tied, include, exclude, opened.values())
    kept = list_kept_statistics(merged, buffers)
    merged = tuple(name for name in merged if name not in kept)
    matters = make_filter(origin.specs, tied, merged, include, exclude)
    _check_alike(matters(origin.specs), opened.values(), "expert", matters, base=origin)
    _check_buffers(matters(origin.specs), origin, opened.values())
    _check_tied({n: k for n, k in tied.items() if k in merged}, opened.values())
    method.check(tuple(opened))
    method.check_tensors(merged)
    double = any(s.dtype == torch.float64 for c in (origin, *opened.values()) for s in c.specs.values())
    return Inputs(
        base=origin,
        experts=opened,
        side=_open_side(origin, method, tuple(opened), statistics, merged),
        name_side=method.name_side,
        tied=tied,
        merged=merged,
        transposed=find_conv1d_weights(origin),
        stacks={name: stack for name, stack in find_stacks(_list_shapes(origin)).items() if name in merged},
        compute=torch.float64 if double else torch.float32,
    )


def list_patterns(patterns: str | Sequence[str]) -> list[str]:
    """Name patterns as a list; a string is one pattern."""
    return [patterns] if isinstance(patterns, str) else list(patterns)


_HEAD = "lm_head.weight"


def is_selected(name: str, include: str | Sequence[str] | None, exclude: str | Sequence[str]) -> bool:
    """Whether a tensor of this name is included and not excluded."""
    wanted = include is None or _match([name], list_patterns(include))
    return wanted and not _match([name], list_patterns(exclude))


def _match(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def select_tensors(
    specs: Mapping[str, TensorSpec],
    tied: Mapping[str, str],
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str],
    experts: Iterable[Checkpoint] = (),
) -> tuple[str, ...]:
    """The floating-point tensors that are merged, tied ones once, batch norm's counters left out.

    Weights with several names are one. They are excluded if one of their names is, else included if one is. A
    pattern may match only tensors that experts have and the base lacks.

    Raises:
        InputError: a pattern that matches no floating-point tensor, or nothing that is left to merge.
    """
    exclude = list_patterns(exclude)
    include = None if include is None else list_patterns(include)
    names_of: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if spec.dtype.is_floating_point and not name.endswith(_COUNTER):
            names_of.setdefault(tied.get(name, name), []).append(name)
    floating = {name for names in names_of.values() for name in names}
    floating |= {name for expert in experts for name in expert if name not in specs}
    for pattern in (*(include or ()), *exclude):
        if not _match(floating, [pattern]):
            head = fnmatchcase(_HEAD, pattern) or fnmatchcase(f"model.{_HEAD}", pattern)
            hint = ", which stores no head: where that is the embedding, name the embedding" if head else ""
            raise InputError(f"the pattern {pattern!r} matches no floating-point tensor of the base{hint}")
    chosen = tuple(
        first
        for first, names in names_of.items()
        if (include is None or _match(names, include)) and not _match(names, exclude)
    )
    if not chosen:
        raise InputError("there is nothing to merge: the base has no floating-point tensor that is included")
    return chosen


Specs = Mapping[str, TensorSpec]


def make_filter(
    base: Specs,
    tied: Mapping[str, str],
    merged: Iterable[str],
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str],
) -> Callable[[Specs], dict[str, TensorSpec]]:
    """Select the tensors on which base and experts must agree: those that are merged, and whatever else no
    pattern leaves out. Tensors that are not merged may be missing.
    """
    chosen = set(merged)

    def matters(name: str) -> bool:
        if name.endswith(_COUNTER):
            return False
        if name in base and base[name].dtype.is_floating_point:
            return tied.get(name, name) in chosen
        return is_selected(name, include, exclude)

    return lambda specs: {name: spec for name, spec in specs.items() if matters(name)}


def _check_alike(
    wanted: Specs,
    others: Iterable[Checkpoint],
    what: str,
    matters: Callable[[Specs], Specs],
    base: Checkpoint | None = None,
) -> None:
    """Names, kinds and shapes must agree; the error names every offender of a checkpoint, and says if only the
    names differ from the base's."""
    for other in others:
        own = {n: spec for n, spec in other.specs.items() if n in wanted}
        problems = list_mismatches(wanted, {**own, **matters(other.specs)})
        if problems:
            way_out = "was it saved from another backbone?"
            if base is not None and _list_shapes(align(base, other, read=False)) == _list_shapes(base):
                way_out = (
                    "these are the base's tensors under other names, which mergekit_lab.merge reads; "
                    "here, open both and give mergekit_lab.checkpoints.align(base, expert)"
                )
            raise InputError(f"{what} {other.label!r} {'; '.join(problems)}: {way_out}")


def _list_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for name, spec in checkpoint.specs.items()}


def _check_buffers(wanted: Specs, base: Checkpoint, experts: Iterable[Checkpoint]) -> None:
    names = [name for name, spec in wanted.items() if not spec.dtype.is_floating_point]
    for expert in experts:
        differing = [name for name in names if not torch.equal(base[name], expert[name])]
        if differing:
            raise InputError(
                f"expert {expert.label!r} has other integer or complex tensors than the base "
                f"({join_names(differing)}): these are copied, never averaged, so they must be equal"
            )


RUNNING_STATISTICS = ("running_mean", "running_var")
"""Of batch norm: buffers that follow the data, not the gradient."""
VARIANCE = "running_var"


def list_kept_statistics(names: Iterable[str], buffers: str) -> list[str]:
    """Batch norm's running statistics among these tensors, where they stay the base's."""
    require_choice("buffers", buffers, ("merge", "base"))
    return [name for name in names if buffers == "base" and name.endswith(RUNNING_STATISTICS)]


_COUNTER = "num_batches_tracked"
"""Of batch norm: how many batches were seen. The merged model has the base's number, in whatever dtype."""


def _check_tied(tied: Mapping[str, str], experts: Iterable[Checkpoint]) -> None:
    for expert in experts:
        untied = [n for n, first in tied.items() if not torch.equal(expert[n], expert[first])]
        if untied:
            raise InputError(
                f"expert {expert.label!r} holds different values for weights that the base ties "
                f"({join_names(untied)}): untie them in the base, or tie them in the expert"
            )


def name_sources(sources: Any, what: str, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Inputs by name: a mapping's own, which must be `names`, else `names` in order, else positions.

    Raises:
        InputError: one path, the wrong number of inputs, or names that are no expert's.
    """
    if isinstance(sources, str | Path | Checkpoint):
        raise InputError(f"{what} is one path ({sources}): give a list or a mapping of checkpoints")
    if isinstance(sources, Mapping):
        named = {str(name): source for name, source in sources.items()}
        if names is not None and named.keys() != set(names):
            raise InputError(
                f"the {what} inputs are for ({join_names(named)}), the experts are ({join_names(names)})"
            )
        return named
    listed = list(sources)
    if names is not None and len(listed) != len(names):
        raise InputError(f"{len(listed)} {what} inputs were given for {len(names)} experts")
    return dict(zip(names or map(str, range(len(listed))), listed, strict=True))


def _require_sources(named: Mapping[str, object], what: str) -> None:
    for name, source in named.items():
        if not isinstance(source, Mapping | str | Path):
            raise InputError(
                f"{what}: {name!r} is a {type(source).__name__}: pass a mapping from expert name to state dict "
                "(or checkpoint path), or a list of them"
            )


def _open_side(
    base: Checkpoint,
    method: Method,
    experts: Sequence[str],
    statistics: Mapping[str, Sources] | None,
    merged: Sequence[str],
) -> dict[str, tuple[Checkpoint, ...]]:
    by_kind = dict(statistics or {})
    known = {*_KINDS, *method.side_inputs}
    for kind in by_kind:
        if kind not in known:
            raise InputError(f"statistics hold {kind!r}, which no method takes{suggest(kind, known)}")

    def without_base(specs: Specs) -> Specs:
        return {name: spec for name, spec in specs.items() if name not in base.specs}

    opened = {}
    for kind in method.side_inputs:
        if kind not in by_kind:
            raise InputError(explain_missing_side(method, kind))
        by_name = name_sources(by_kind[kind], kind, experts)
        _require_sources(by_name, kind)
        opened[kind] = tuple(open_checkpoint(by_name[name], f"{kind} of {name}") for name in experts)
        own = {n: base.specs[n] for n in merged if method.name_side(kind, n) == n}
        if own:
            _check_alike(own, opened[kind], f"the {kind}", without_base)
        else:
            check_same_names(base, method, kind, opened[kind])
    return opened


def explain_missing_side(method: Method, kind: str) -> str:
    """What to give a method that reads side inputs of a kind; the same on the command line and in Python."""
    if kind not in _KINDS:
        return (
            f"{type(method).__name__} needs a {kind} of every expert, which takes the model and samples: merge "
            f"in a run over tasks, or give statistics={{{kind!r}: …}}, which its docstring says how to make"
        )
    return (
        f"{type(method).__name__} needs a {kind} checkpoint for every expert: give {kind}s=[…] in the experts' "
        f"order, or {{name: path}}; mergekit_lab.curvature makes them"
    )


def check_same_names(base: Checkpoint, method: Method, kind: str, side: Sequence[Checkpoint]) -> None:
    """Refuse side inputs, under names of their own, that match none of the model's, or not the same ones."""
    stacks = find_stacks({name: spec.shape for name, spec in base.specs.items()})
    names = [*base.specs, *(member for stack in stacks.values() for member in stack.members)]
    wanted = {key for name in names if (key := method.name_side(kind, name)) is not None}
    held = [wanted & checkpoint.keys() for checkpoint in side]
    if side[0] and not held[0]:
        raise InputError(f"{side[0].label} holds nothing under the names of this model ({join_names(wanted)})")
    for checkpoint, keys in zip(side, held, strict=True):
        if keys != held[0]:
            raise InputError(f"{checkpoint.label} and {side[0].label} differ in ({join_names(keys ^ held[0])})")
