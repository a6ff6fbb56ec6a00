"""The one driver: it reads the checkpoints, checks them, and feeds the method.

Everything that is the same for all methods stands here and nowhere else: agreement of names and shapes,
buffers, tied weights, dtypes, blocks, devices, non-finite input. Memory is bounded by a few tensors:
checkpoints are read one tensor at a time, and elementwise methods see blocks that fit a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.checkpoints import Checkpoint, TensorSpec, open_checkpoint
from mergekit_lab.errors import InputError, listing
from mergekit_lab.merging.contract import Method, Site

CPU_BLOCK = 1 << 17
"""Entries of one tensor handed over at a time on a CPU: T of them in float32 stay in its cache."""
DEVICE_BLOCK = 1 << 26
"""The same on an accelerator, where few large launches are faster."""

Source = Checkpoint | Mapping[str, Tensor] | str | Path
Sources = Mapping[str, Source] | Sequence[Source]
Notes = dict[str, dict[str, object]]


@dataclass(frozen=True)
class _Model:
    """The checked inputs of one merge, and the blocks they are read in."""

    base: Checkpoint
    expert_list: tuple[Checkpoint, ...]
    side: Mapping[str, tuple[Checkpoint, ...]]
    experts: tuple[str, ...]
    weights: Tensor
    compute: torch.dtype
    device: torch.device
    tied: Mapping[str, str]
    side_name: Callable[[str, str], str | None]
    changes: tuple[Callable[[str, Tensor, Site], Tensor], ...] = ()
    notes: Notes = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the floating-point tensors that are merged, tied ones once."""
        return [n for n, spec in self.base.specs.items() if spec.dtype.is_floating_point and n not in self.tied]

    @property
    def entries(self) -> int:
        return sum(self.base.specs[name].numel for name in self.names)

    @property
    def buffer_entries(self) -> int:
        return sum(s.numel for s in self.base.specs.values() if not s.dtype.is_floating_point)

    @property
    def block(self) -> int:
        return CPU_BLOCK if self.device.type == "cpu" else DEVICE_BLOCK

    def map(self, change: Callable[[str, Tensor, Site], Tensor]) -> _Model:
        return replace(self, changes=(*self.changes, change))

    def blocks(self) -> Iterator[tuple[str, Tensor, Site]]:
        for name in self.names:
            for _, deltas, site in self.flat(name, survey=None, with_side=False):
                for change in self.changes:
                    deltas = change(name, deltas, site)
                yield name, deltas, site

    def side_blocks(self, kind: str) -> Iterator[Tensor]:
        for name in self.names:
            rows = [checkpoint[name].reshape(-1) for checkpoint in self.side[kind]]
            for start in range(0, rows[0].numel(), self.block):
                yield self._stack(rows, slice(start, start + self.block))

    def flat(self, name: str, survey: Any, with_side: bool = True) -> Iterator[tuple[Tensor, Tensor, Site]]:
        """`θ0 [n]`, `δ [T, n]` and site of each flat block of one tensor."""
        base = self.base[name].reshape(-1)
        rows = [expert[name].reshape(-1) for expert in self.expert_list]
        sides = {k: [row.reshape(-1) for row in v] for k, v in self._sides(name).items()} if with_side else {}
        for start in range(0, base.numel(), self.block):
            part = slice(start, start + self.block)
            origin = base[part].to(self.device, self.compute)
            deltas = self._stack(rows, part).sub_(origin)
            self._check_finite(name, deltas)
            side = {kind: self._stack(values, part) for kind, values in sides.items()}
            yield origin, deltas, self.site(name, survey, side, start)

    def whole(self, name: str, survey: Any) -> tuple[Tensor, Tensor, Site]:
        """`θ0 [*S]`, `δ [T, *S]` and site of one tensor."""
        base = self.base[name].to(self.device, self.compute)
        deltas = self._stack([expert[name] for expert in self.expert_list], ...).sub_(base)
        self._check_finite(name, deltas)
        side = {kind: self._stack(values, ...) for kind, values in self._sides(name).items()}
        return base, deltas, self.site(name, survey, side, 0)

    def _sides(self, name: str) -> dict[str, list[Tensor]]:
        """The side inputs of one tensor, by kind, an expert each."""
        found = {}
        for kind, checkpoints in self.side.items():
            key = self.side_name(kind, name)
            if key is not None and all(key in checkpoint for checkpoint in checkpoints):
                found[kind] = [checkpoint[key] for checkpoint in checkpoints]
        return found

    def site(self, name: str, survey: Any, side: Mapping[str, Tensor], offset: int) -> Site:
        def note(key: str, value: object) -> None:
            self.notes.setdefault(name, {})[key] = value

        return Site(self.experts, self.weights, offset, side, survey, note)

    def _stack(self, rows: Sequence[Tensor], part: Any) -> Tensor:
        parts = [row[part] for row in rows]
        out = torch.empty((len(parts), *parts[0].shape), dtype=self.compute, device=self.device)
        for slot, values in zip(out, parts, strict=True):
            slot.copy_(values)
        return out

    def _check_finite(self, name: str, deltas: Tensor) -> None:
        if bool(torch.isfinite(deltas).all()):
            return
        for checkpoint in (self.base, *self.expert_list):
            values = checkpoint[name]
            bad = int((~torch.isfinite(values.float())).sum())
            if bad:
                raise InputError(
                    f"tensor {name!r} of {checkpoint.label} holds {bad} NaN or infinite entries: its training "
                    "diverged or the file is damaged"
                )
        raise InputError(f"the task vectors of tensor {name!r} overflow {self.compute}")


def _check_alike(wanted: Mapping[str, TensorSpec], others: Iterable[Checkpoint], what: str) -> None:
    """Names, kinds and shapes must agree; the error names every offender of a checkpoint."""
    for other in others:
        missing, extra = wanted.keys() - other.specs.keys(), other.specs.keys() - wanted.keys()
        shared = [name for name in wanted if name in other.specs]
        shapes = [
            f"{n} {list(other.specs[n].shape)} where the base has {list(wanted[n].shape)}"
            for n in shared
            if other.specs[n].shape != wanted[n].shape
        ]
        kinds = [
            f"{n} {other.specs[n].dtype} where the base has {wanted[n].dtype}"
            for n in shared
            if other.specs[n].dtype.is_floating_point != wanted[n].dtype.is_floating_point
        ]
        problems = []
        if missing:
            problems.append(f"lacks {len(missing)} tensors the base has ({listing(missing)})")
        if extra:
            problems.append(f"has {len(extra)} tensors the base lacks ({listing(extra)})")
        if shapes:
            problems.append(f"has other shapes ({listing(shapes)})")
        if kinds:
            problems.append(f"has other kinds of numbers ({listing(kinds)})")
        if problems:
            raise InputError(
                f"{what} {other.label!r} {'; '.join(problems)}: was it saved from another backbone?"
            )


def _check_buffers(base: Checkpoint, experts: Iterable[Checkpoint]) -> None:
    names = [name for name, spec in base.specs.items() if not spec.dtype.is_floating_point]
    for expert in experts:
        differing = [name for name in names if not torch.equal(base[name], expert[name])]
        if differing:
            raise InputError(
                f"expert {expert.label!r} has other integer buffers than the base ({listing(differing)}): "
                "buffers are copied, never averaged, so they must be equal"
            )


def _check_tied(tied: Mapping[str, str], experts: Iterable[Checkpoint]) -> None:
    for expert in experts:
        untied = [n for n, first in tied.items() if not torch.equal(expert[n], expert[first])]
        if untied:
            raise InputError(
                f"expert {expert.label!r} holds different values for weights that the base ties "
                f"({listing(untied)}): untie them in the base, or tie them in the expert"
            )


def _named(sources: Sources, what: str) -> dict[str, Source]:
    if isinstance(sources, str | Path | Checkpoint):
        raise InputError(f"{what} must be a mapping from name to checkpoint or a list of checkpoints")
    if isinstance(sources, Mapping):
        named = {str(name): source for name, source in sources.items()}
    else:
        named = {str(position): source for position, source in enumerate(sources)}
    for name, source in named.items():
        if not isinstance(source, Mapping | str | Path):
            raise InputError(
                f"{what}: {name!r} is a {type(source).__name__}: pass a mapping from expert name to state dict "
                "(or checkpoint path), or a list of them"
            )
    return named


def _side_inputs(
    method: Method, experts: Sequence[str], statistics: Mapping[str, Sources] | None
) -> dict[str, tuple[Checkpoint, ...]]:
    given = dict(statistics or {})
    opened = {}
    for kind in method.side_inputs:
        if kind not in given:
            raise InputError(
                f"{type(method).__name__} needs a {kind} checkpoint for every expert: pass "
                f"statistics={{{kind!r}: …}}"
            )
        by_name = _named(given[kind], kind)
        if not isinstance(given[kind], Mapping) and len(by_name) == len(experts):
            by_name = dict(zip(experts, by_name.values(), strict=True))
        if by_name.keys() != set(experts):
            raise InputError(
                f"the {kind} checkpoints are for ({listing(by_name)}), the experts are ({listing(experts)})"
            )
        opened[kind] = tuple(open_checkpoint(by_name[name], f"{kind} of {name}") for name in experts)
    return opened


def _open(
    base: Source,
    experts: Sources,
    method: Method,
    statistics: Mapping[str, Sources] | None,
    device: str | torch.device,
    notes: Notes | None,
) -> _Model:
    origin = open_checkpoint(base, "the base")
    opened = {name: open_checkpoint(source, name) for name, source in _named(experts, "experts").items()}
    if not opened:
        raise InputError("there is nothing to merge: no expert was given")
    expert_list = tuple(opened.values())
    _check_alike(origin.specs, expert_list, "expert")
    complex_names = [name for name, spec in origin.specs.items() if spec.dtype.is_complex]
    if complex_names:
        raise InputError(f"complex tensors cannot be merged ({listing(complex_names)})")
    _check_buffers(origin, expert_list)
    side = _side_inputs(method, tuple(opened), statistics)
    for kind, checkpoints in side.items():
        own = {
            n: s
            for n, s in origin.specs.items()
            if s.dtype.is_floating_point and method.side_name(kind, n) == n
        }
        if own:
            _check_alike(own, checkpoints, f"the {kind}")
    tied = origin.tied()
    _check_tied(tied, expert_list)
    double = any(s.dtype == torch.float64 for c in (origin, *expert_list) for s in c.specs.values())
    compute = torch.float64 if double else torch.float32
    weights = torch.tensor(method.expert_weights(tuple(opened)), dtype=compute, device=device)
    return _Model(
        base=origin,
        expert_list=expert_list,
        side=side,
        experts=tuple(opened),
        weights=weights,
        compute=compute,
        device=torch.device(device),
        tied=tied,
        side_name=method.side_name,
        notes={} if notes is None else notes,
    )


def _merged(model: _Model, name: str, method: Method, survey: Any, dtype: torch.dtype) -> Tensor:
    """One merged tensor, on the CPU. `α = 0` gives the base bit for bit."""
    add = torch.promote_types(model.compute, dtype)
    out = torch.empty(model.base.specs[name].shape, dtype=dtype)
    if method.scale == 0:
        return out.copy_(model.base[name])
    if method.elementwise:
        target = out.view(-1)
        for base, deltas, site in model.flat(name, survey):
            merged = method.merge(name, base, deltas, site)
            result = base.to(add) + merged.to(add) * method.scale
            target[site.offset : site.offset + base.numel()] = result
        return out
    base, deltas, site = model.whole(name, survey)
    merged = method.merge(name, base, deltas, site)
    return out.copy_(base.to(add) + merged.to(add) * method.scale)


def merged_tensors(
    base: Source,
    experts: Sources,
    method: Method,
    *,
    statistics: Mapping[str, Sources] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    notes: Notes | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Merge and yield one named tensor after another, in the base's order; see `merge_state_dicts`.

    Inputs are checked when this is called, tensors are read as the iterator advances.
    """
    model = _open(base, experts, method, statistics, device, notes)
    survey = method.survey(model)
    return _generate(model, method, survey, dtype)


def _generate(
    model: _Model, method: Method, survey: Any, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    shared = set(model.tied.values())
    kept: dict[str, Tensor] = {}
    for name, spec in model.base.specs.items():
        if name in model.tied:
            result = kept[model.tied[name]]
        elif spec.dtype.is_floating_point:
            result = _merged(model, name, method, survey, dtype or spec.dtype)
        else:
            result = model.base[name].clone()
        if name in shared:
            kept[name] = result
        yield name, result


def merge_state_dicts(
    base: Source,
    experts: Sources,
    method: Method,
    *,
    fishers: Sources | None = None,
    statistics: Mapping[str, Sources] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    notes: Notes | None = None,
) -> dict[str, Tensor]:
    """Merge experts of one base into one state dict.

    Args:
        base: `θ0`: a state dict, an open `Checkpoint`, or the path of one.
        experts: `θ_t`: a mapping from name to checkpoint, or a list, named "0", "1", … by position.
            Names and shapes must be the base's.
        method: what to do, e.g. `TIES(density=0.2)`.
        fishers: short for `statistics={"fisher": fishers}`.
        statistics: side inputs by kind; each a mapping by expert name or a list in the experts' order.
        dtype: of the floating-point results; each tensor's own by default. Computation is in float32,
            or float64 where an input is.
        device: where the arithmetic happens. Results are on the CPU.
        notes: a dict that receives diagnostics, `{tensor: {key: value}}` (EpiMer's `eta`).

    Returns:
        The merged tensors, in the base's order. Integer and boolean buffers are copies of the base's;
        weights tied in the base are tied in the result.

    Raises:
        InputError: inputs that disagree (every offender is named), NaN or infinite entries, no experts,
            missing side inputs, unreadable files.
    """
    if fishers is not None:
        if statistics and "fisher" in statistics:
            raise InputError("give either fishers=… or statistics={'fisher': …}, not both")
        statistics = {**(statistics or {}), "fisher": fishers}
    pairs = merged_tensors(
        base, experts, method, statistics=statistics, dtype=dtype, device=device, notes=notes
    )
    return dict(pairs)
