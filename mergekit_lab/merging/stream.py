"""The driver of every merge: it reads tensors, hands them to the method in pieces, and adds the base.

From the top: `merge_state_dicts` and `merge_tensors` open the inputs (`inputs.py`), make the method's survey,
and cut the merge into jobs (`jobs.py`). `_run_job` merges the tensors of one job.

A job has one tensor, which is cut into blocks that fit a CPU's cache; or many small tensors, pooled into a
block that fills a GPU; or same-shaped matrices, stacked for one factorization. Workers take jobs in turn, one
for each core or device, so reading, arithmetic and the consumer's writing overlap. Memory is bounded by the
jobs in flight, not by the model. The result does not depend on any of this.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from mergekit_lab.checkpoints import open_checkpoint
from mergekit_lab.checkpoints.casting import cast, check_range
from mergekit_lab.errors import InputError
from mergekit_lab.merging.blocks import Notes, Reader
from mergekit_lab.merging.contract import Method, Segment, Site
from mergekit_lab.merging.devices import Devices, parse_devices, resolve_device
from mergekit_lab.merging.inputs import VARIANCE, Inputs, Source, Sources, open_inputs
from mergekit_lab.merging.jobs import STACK_BYTES, Results, count_members, count_workers, run_jobs
from mergekit_lab.merging.spectral import SpectralMethod
from mergekit_lab.merging.subspace import Frame, SubspaceMethod
from mergekit_lab.merging.transfers import allocate_result


def merge_state_dicts(
    base: Source,
    experts: Sources,
    method: Method,
    *,
    fishers: Sources | None = None,
    grams: Sources | None = None,
    statistics: Mapping[str, Sources] | None = None,
    dtype: torch.dtype | None = None,
    device: Devices = "cpu",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    buffers: str = "merge",
    notes: Notes | None = None,
) -> dict[str, Tensor]:
    """Merge experts of one base into one state dict.

    Args:
        base: `θ0`: a state dict, an open `Checkpoint`, or the path of one.
        experts: `θ_t`: a mapping from name to checkpoint, or a list, named "0", "1", … by position.
            Names and shapes must be the base's.
        method: what to do, e.g. `TIES(density=0.2)`.
        fishers, grams: short for `statistics={"fisher": …, "gram": …}`.
        statistics: side inputs by kind; each a mapping by expert name or a list in the experts' order.
        dtype: the results' floating-point dtype; each tensor's own by default. Computation is in float32,
            or float64 where an input is.
        device: where the arithmetic happens; several devices (`["cuda:0", "cuda:1"]`) share the tensors.
        include, exclude: name patterns (`"*.mlp.*"`); floating-point tensors that are not included, or are
            excluded, stay the base's.
        buffers: "merge" batch norm's running statistics as other tensors, or keep those of the "base". A
            merged variance that would be negative is the smallest of the base's and the experts'.
            `num_batches_tracked` is always the base's.
        notes: a dict that receives diagnostics, `{tensor: {key: value}}` (EpiMer's `eta`).

    Returns:
        The merged tensors, in the base's order, each on the device of its base. Integer and boolean buffers
        are copies of the base's; weights tied in the base are tied in the result.

    Raises:
        InputError: inputs that disagree (every offender is named), NaN or infinite entries, no experts,
            missing side inputs, unreadable files, a pattern that matches nothing, a device that is not there.
    """
    for kind, sources in (("fisher", fishers), ("gram", grams)):
        if sources is not None and kind in (statistics or {}):
            raise InputError(f"give either {kind}s=… or statistics={{{kind!r}: …}}, not both")
        if sources is not None:
            statistics = {**(statistics or {}), kind: sources}
    origin = open_checkpoint(base, "the base")
    pairs = dict(
        merge_tensors(
            origin, experts, method, statistics=statistics, dtype=dtype, device=device,
            include=include, exclude=exclude, buffers=buffers, notes=notes,
        )
    )  # fmt: skip
    return {name: pairs[name] for name in origin}


def merge_tensors(
    base: Source,
    experts: Sources,
    method: Method,
    *,
    statistics: Mapping[str, Sources] | None = None,
    dtype: torch.dtype | None = None,
    device: Devices = "cpu",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    buffers: str = "merge",
    notes: Notes | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Merge and yield one named tensor after another; see `merge_state_dicts` for the arguments.

    Inputs are checked in this call. Tensors are read and merged while the iterator advances, a few ahead of it.
    Tensors copied from the base come first, then merged ones in the order in which they finish. Tied names
    follow each other.
    """
    inputs = open_inputs(base, experts, method, statistics, include, exclude, buffers)
    if isinstance(method, SubspaceMethod) and method.scale != 0:
        frame, jobs = merge_coordinates(inputs, method, device, notes, _lift_into(inputs, dtype))
        return _generate(inputs, frame.inputs.merged, jobs, dtype)
    readers = open_readers(inputs, method, device, notes)
    survey = survey_model(readers)

    def run(reader: Reader, names: list[str]) -> Results:
        return _run_job(reader, names, survey, dtype)

    return _generate(inputs, inputs.merged, run_jobs(readers, run), dtype)


def open_readers(inputs: Inputs, method: Method, device: Devices, notes: Notes | None) -> list[Reader]:
    """One reader for each device. They share the notes."""
    shared: Notes = {} if notes is None else notes
    return [Reader(inputs, method, resolve_device(each), notes=shared) for each in parse_devices(device)]


def survey_model(readers: list[Reader]) -> Any:
    """The method's survey. A method may split it among the devices, and among some cores of a CPU."""
    shares = [min(count_workers(r), _COUNTING) if r.device.type == "cpu" else 1 for r in readers]
    sharing = tuple(r.device for r, count in zip(readers, shares, strict=True) for _ in range(count))
    return readers[0].method.survey(replace(readers[0], sharing=sharing))


_COUNTING = 4
"""Cores that share a survey at most: each has its own counters, 8 MB for each expert."""


def _generate(
    inputs: Inputs, merged: Sequence[str], jobs: Iterator[Results], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that stay the base's, then those that the jobs merge."""

    def copy_kept() -> Iterator[tuple[str, Tensor]]:
        changed = {*merged, *inputs.tied}
        for name, spec in inputs.base.specs.items():
            if name not in changed:
                kept = inputs.base[name].clone()
                yield name, cast(name, kept, dtype) if dtype and spec.dtype.is_floating_point else kept

    for name, tensor in chain(copy_kept(), chain.from_iterable(jobs)):
        yield name, tensor
        yield from ((other, tensor) for other, first in inputs.tied.items() if first == name)


def _run_job(reader: Reader, names: list[str], survey: Any, dtype: torch.dtype | None) -> Results:
    """Merge the tensors of one job. Each result has the dtype asked for, on the device of its base."""
    method, inputs = reader.method, reader.inputs
    specs = inputs.base.specs
    out = {
        name: allocate_result(specs[name].shape, dtype or specs[name].dtype, inputs.base[name].device)
        for name in names
    }
    names = [name for name in names if out[name].numel()]
    if not names:
        return list(out.items())
    if method.scale == 0:
        for name in names:
            _store(name, out[name], inputs.base[name])
    elif method.elementwise:
        _run_blocks(reader, names, survey, out)
    elif method.by_matrix and names[0] in inputs.stacks:
        _run_stack(reader, names[0], survey, out[names[0]])
    else:
        together = isinstance(method, SpectralMethod) and method.is_matrix(names[0], out[names[0]].shape)
        for part in [names] if together else [[name] for name in names]:
            turn = reader.turn if together else nullcontext()
            with read_stack(reader, part, survey, turn) as (bases, deltas, sites):
                if isinstance(method, SpectralMethod) and together:
                    merges = method.merge_matrices(deltas, sites)
                else:
                    own = bases[0].to(inputs.compute, copy=True)  # a method must not write into the inputs
                    merges = method.merge(part[0], own, deltas[0], sites[0])[None]
                    del own
            del deltas, sites
            for name, base, merged in zip(part, bases, merges, strict=True):
                reader.expect_finite_result(name, merged)
                wide = base.to(inputs.compute, copy=True)
                _store(name, out[name], _add(wide, merged, method.scale, out[name].dtype))
    for name in names:
        if name.endswith(VARIANCE):
            _raise_variance(reader, name, out[name])
    return list(out.items())


def _run_blocks(reader: Reader, names: list[str], survey: Any, out: Mapping[str, Tensor]) -> None:
    """Merge by an elementwise method, block by block: one tensor, or several that are pooled."""
    method, pieces, read = reader.method, list(reader.cut(names)), _choose_reader(reader, names)
    tensor = None
    if not reader.pools:

        def read_blocks() -> Iterator[tuple[Tensor, Tensor, Site]]:
            for piece in pieces:
                yield *read(piece), reader.make_site(piece, survey=survey)

        tensor = method.survey_tensor(names[0], out[names[0]].numel(), read_blocks)
    for piece in pieces:
        base, deltas = read(piece)
        members = [segment.name for segment in piece]
        if not method.propagates:
            reader.expect_finite(members, deltas)
        site = reader.make_site(piece, reader.read_block_sides(piece), survey, tensor)
        merged = method.merge(members[0], base, deltas, site)
        reader.expect_finite(members, merged[None])  # it may overflow where its inputs did not
        if len(piece) == 1:
            target = out[members[0]].view(-1)[piece[0].start : piece[0].stop]
            _store(members[0], target, _add(base, merged, method.scale, target.dtype))
            continue
        targets = [out[s.name].view(-1)[s.start : s.stop] for s in piece]
        finest = max((t.dtype for t in targets), key=lambda dtype: torch.finfo(dtype).bits)
        sums = _unflatten_dense_tensors(_add(base, merged, method.scale, finest), targets)
        for name, target, values in zip(members, targets, sums, strict=True):
            check_range(name, values, target.dtype)
        torch._foreach_copy_(targets, sums)


def _choose_reader(reader: Reader, names: list[str]) -> Callable[[list[Segment]], tuple[Tensor, Tensor]]:
    """A function that reads blocks: again in each pass, unless an accelerator can hold the whole tensor."""
    size = sum(reader.inputs.base.specs[name].numel for name in names)
    if reader.pools or reader.device.type == "cpu" or size * 4 * (1 + len(reader.experts)) > STACK_BYTES:
        return reader.read
    held: dict[Segment, tuple[Tensor, Tensor]] = {}

    def read(piece: list[Segment]) -> tuple[Tensor, Tensor]:
        if piece[0] not in held:
            held[piece[0]] = reader.read(piece)
        return held[piece[0]]

    return read


@contextmanager
def read_stack(
    reader: Reader, names: list[str], survey: Any, turn: AbstractContextManager[Any]
) -> Iterator[tuple[list[Tensor], Tensor, list[Site]]]:
    """Read and check the same-shaped tensors of one job: `θ0` in their own dtype, `δ` `[B, T, *S]`, and sites.

    The block runs while this worker holds `turn`, the device's lock for factorizations. Reading needs no turn,
    so it overlaps with other workers' factorizations, unless the tensors are so large that two jobs would not
    fit the device.
    """
    size = 4 * len(reader.experts) * sum(reader.inputs.base.specs[name].numel for name in names)
    large = size > STACK_BYTES
    with turn if large else nullcontext():
        bases = [reader.read_base(name) for name in names]
        each = [reader.read_deltas(name, base) for name, base in zip(names, bases, strict=True)]
        deltas = torch.stack(each) if len(each) > 1 else each[0][None]
        del each
        sites = [reader.make_whole_site(name, survey) for name in names]
        reader.settle()
        with nullcontext() if large else turn:
            yield bases, deltas, sites


def _run_stack(reader: Reader, name: str, survey: Any, out: Tensor) -> None:
    """Merge the matrices of a mixture's experts, one by one, or several at once on an accelerator."""
    method, stack, flat = reader.method, reader.inputs.stacks[name], out.view(-1)
    size, count = math.prod(stack.shape), len(stack.members)
    batched = isinstance(method, SpectralMethod) and method.is_matrix(stack.members[0], stack.shape)
    step = count_members(reader, size) if batched else 1
    for start in range(0, count, step):
        numbers = range(start, min(start + step, count))
        part = Segment(name, start * size, numbers.stop * size)
        base, deltas = reader.read([part])
        reader.expect_finite([name], deltas)
        sites = [reader.make_member_site(name, number, survey) for number in numbers]
        reader.settle()
        each = deltas.view(len(deltas), len(numbers), *stack.shape).transpose(0, 1)
        with reader.turn if batched else nullcontext():
            if isinstance(method, SpectralMethod) and batched:
                merged = method.merge_matrices(each.contiguous(), sites)
            else:
                merged = method.merge(stack.members[start], base.view(stack.shape), each[0], sites[0])
        reader.expect_finite_result(name, merged)
        target = flat[part.start : part.stop]
        _store(name, target, _add(base, merged.reshape(-1), method.scale, target.dtype))


def _raise_variance(reader: Reader, name: str, out: Tensor) -> None:
    """Replace negative entries of a merged variance by the smallest of the base's and the experts' entries."""
    below = out < 0
    if bool(below.any()):
        models = (reader.inputs.base, *reader.inputs.experts.values())
        least = torch.stack([model[name].to(out) for model in models]).amin(dim=0)
        out.copy_(torch.where(below, least, out))
        count = int(below.sum())
        reader.notes.setdefault(name, {})["variance"] = f"{count} negative entries are the inputs' smallest"


def _store(name: str, out: Tensor, values: Tensor) -> None:
    check_range(name, values, out.dtype)
    out.copy_(values)


def _add(base: Tensor, merged: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """`base + scale·merged`, computed in `base`'s memory, or in float64 if the result is stored so.

    Raises:
        InputError: a very large scale makes a finite task vector overflow.
    """
    if dtype == torch.float64:
        base, merged = base.double(), merged.double()
    if abs(scale) > _VERY_LARGE and merged.numel():
        largest = abs(scale) * float(torch.linalg.vector_norm(merged, math.inf))
        if largest > torch.finfo(merged.dtype).max:
            raise InputError(
                f"the merged weights overflow {merged.dtype} at a coefficient of {scale:g}: lower it"
            )
    return base.add_(merged, alpha=scale)


_VERY_LARGE = 1e4
"""From this coefficient on, overflow is checked first. Below it, only weights of 1e34 could overflow."""


Lift = Callable[[Frame, list[str], Callable[[list[str], torch.dtype | None], Results]], Results]


def merge_coordinates(
    inputs: Inputs, method: SubspaceMethod, device: Devices, notes: Notes | None, lift: Lift | None = None
) -> tuple[Frame, Iterator[Results]]:
    """A merge in the experts' joint subspace: its bases, and the merged coordinates of each job.

    Args:
        lift: turns a job's coordinates into other results; None returns the coordinates.
    """
    frame = Frame(inputs, method, open_readers(inputs, method, device, notes)[0].device)
    readers = open_readers(frame.inputs, method.inner, device, notes)
    survey = survey_model(readers)

    def run(reader: Reader, names: list[str]) -> Results:
        def merge(names: list[str], dtype: torch.dtype | None) -> Results:
            return _run_job(reader, names, survey, dtype)

        return merge(names, None) if lift is None else lift(frame, names, merge)

    return frame, run_jobs(readers, run)


def _lift_into(inputs: Inputs, dtype: torch.dtype | None) -> Lift:
    """A function that makes merged tensors of merged coordinates, in the dtype asked for."""

    def lift_one(frame: Frame, name: str, coordinates: Tensor) -> Tensor:
        base = inputs.base[name]
        b, a = frame.find_basis(name).lift(coordinates)
        change = (b @ a).to(base.device, inputs.compute)
        out = allocate_result(tuple(base.shape), dtype or base.dtype, base.device)
        wide = base.to(inputs.compute, copy=True)
        change = change.mT if name in inputs.transposed else change
        _store(name, out, _add(wide, change, 1.0, out.dtype))
        return out

    def lift(frame: Frame, names: list[str], merge: Callable[..., Results]) -> Results:
        matrices = [name for name in names if name in frame.shapes]
        others = [name for name in names if name not in frame.shapes]
        merged = [(name, lift_one(frame, name, value)) for name, value in merge(matrices, None)]
        return merged + merge(others, dtype)

    return lift
