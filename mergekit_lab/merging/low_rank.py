"""Store a merge as the base's change in low-rank factors: small, and with every expert's share separate.

A matrix is stored as atoms `U [m, p]`, `V [n, p]` and their coordinates `d [p]` (`Δ = U diag(d) Vᵀ`, the
experts' atoms side by side, equally many of each). Any other tensor is stored as every expert's task vector and
the divisor of their sum. EMR-Merging is stored as the unified vector, every expert's mask in bits, and the
rescalers. `checkpoints.low_rank` reads and expands them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.checkpoints import TensorSpec
from mergekit_lab.checkpoints.low_rank import (
    COORDINATES,
    DIVISOR,
    LEFT,
    MASKS,
    PARTS,
    RESCALERS,
    RIGHT,
    SHARED,
    count_bytes,
)
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.merging.blocks import Notes, Reader
from mergekit_lab.merging.contract import Method, Segment
from mergekit_lab.merging.devices import Devices
from mergekit_lab.merging.dropping import pack_mask
from mergekit_lab.merging.emr import EMR
from mergekit_lab.merging.inputs import Source, Sources, open_inputs
from mergekit_lab.merging.jobs import run_jobs
from mergekit_lab.merging.spectral import AtomMethod, cap_rank
from mergekit_lab.merging.stacks import find_stacks
from mergekit_lab.merging.stream import open_readers, read_stack, survey_model


def require_factors(method: Method, by_task: bool = False) -> AtomMethod | EMR:
    """The method as one whose result has factors, by task or of low rank.

    Raises:
        InputError: it has none.
    """
    if by_task and not method.by_task:
        raise InputError(
            f"{type(method).__name__} makes one model for all tasks: format=per_task takes TSVC and EMR"
        )
    if not by_task and not isinstance(method, AtomMethod):
        raise InputError(
            f"{type(method).__name__} gives no low-rank factors: TSVM, TSVC and EpiMer do; store others dense"
        )
    assert isinstance(method, AtomMethod | EMR)
    return method


def merge_factors(
    base: Source,
    experts: Sources,
    method: Method,
    *,
    statistics: Mapping[str, Sources] | None = None,
    device: Devices = "cpu",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    notes: Notes | None = None,
) -> tuple[dict[str, TensorSpec], Iterator[tuple[str, Tensor]]]:
    """Merge, and return the base's change in factors. `merge_state_dicts` describes the arguments.

    Returns:
        What every factor will be, and the factors as they are made, on the CPU, in the precision of the merge.
        `NAME.u`, `NAME.v`, `NAME.coordinates` of a matrix, `NAME.parts` and `NAME.divisor` of another tensor;
        of EMR `NAME.shared`, `NAME.masks` and `NAME.rescalers`.

    Raises:
        InputError: the method has no factors; and what `merge_state_dicts` refuses.
    """
    storable = require_factors(method, method.by_task)
    inputs = open_inputs(base, experts, method, statistics, include, exclude)
    readers = open_readers(inputs, method, device, notes)
    survey = storable.find_rescalers(readers[0]) if isinstance(storable, EMR) else survey_model(readers)

    def run(reader: Reader, names: list[str]) -> list[tuple[str, Tensor]]:
        if isinstance(storable, EMR):
            return [pair for name in names for pair in _mask(storable, reader, name, survey)]
        return [(name, value.cpu()) for name, value in _factorize_job(storable, reader, names, survey)]

    shapes = {name: inputs.base.specs[name].shape for name in inputs.merged}
    specs = plan_factors(shapes, len(inputs.experts), storable, inputs.compute)
    return specs, (pair for results in run_jobs(readers, run) for pair in results)


def plan_factors(
    merged: Mapping[str, tuple[int, ...]], experts: int, method: AtomMethod | EMR, dtype: torch.dtype
) -> dict[str, TensorSpec]:
    """What every factor will be, of the shapes that are merged, in the dtype of the arithmetic.

    Raises:
        InputError: a tensor that stacks the matrices of a mixture's experts, which factors are not made of.
    """
    specs: dict[str, TensorSpec] = {}
    if isinstance(method, EMR):
        for name, shape in merged.items():
            specs |= {
                name + SHARED: TensorSpec(tuple(shape), dtype),
                name + MASKS: TensorSpec((experts, count_bytes(shape)), torch.uint8),
                name + RESCALERS: TensorSpec((experts,), dtype),
            }
        return specs
    stacks = find_stacks(merged)
    if stacks:
        raise InputError(
            f"low-rank factors hold one matrix per tensor, but {join_names(stacks)} are stacks of a mixture's "
            "experts: exclude them, or store the merge dense"
        )
    for name, shape in merged.items():
        if method.is_matrix(name, shape):
            atoms = experts * cap_rank(shape, experts, method.rank)
            shapes = {LEFT: (shape[0], atoms), RIGHT: (shape[1], atoms), COORDINATES: (atoms,)}
        else:
            shapes = {PARTS: (experts, *shape), DIVISOR: ()}
        specs |= {name + suffix: TensorSpec(tuple(size), dtype) for suffix, size in shapes.items()}
    return specs


def _factorize_job(
    method: AtomMethod, reader: Reader, names: list[str], survey: Any
) -> Iterator[tuple[str, Tensor]]:
    shape = reader.inputs.base.specs[names[0]].shape
    if method.is_matrix(names[0], shape):
        with read_stack(reader, names, survey, reader.turn) as (_, deltas, sites):
            atoms, coordinates = method.merge_atoms(deltas, sites)
        for name, u, v, d in zip(names, atoms.u, atoms.v, coordinates, strict=True):
            yield from ((name + LEFT, u), (name + RIGHT, v), (name + COORDINATES, d))
        return
    for name in names:
        deltas = reader.read_deltas(name, reader.read_base(name))
        site = reader.make_site([Segment(name, 0, deltas[0].numel())])
        reader.settle()
        yield from ((name + PARTS, site.weigh(deltas)), (name + DIVISOR, method.find_divisor(site)))


def _mask(method: EMR, reader: Reader, name: str, rescalers: Tensor) -> list[tuple[str, Tensor]]:
    spec, experts, dtype = reader.inputs.base.specs[name], len(reader.experts), reader.inputs.compute
    shared = torch.empty(spec.numel, dtype=dtype)
    bits = torch.zeros(experts, count_bytes(spec.shape), dtype=torch.uint8)
    for piece in reader.cut([name]):
        _, deltas = reader.read(piece)
        reader.expect_finite([name], deltas)
        unified, masks = method.unify(reader.make_site(piece).weigh(deltas))
        reader.settle()
        shared[piece[0].start : piece[0].stop] = unified.cpu()
        pack_mask(masks.cpu(), bits, piece[0].start)
    return [
        (name + SHARED, shared.view(spec.shape)),
        (name + MASKS, bits),
        (name + RESCALERS, rescalers.to(dtype)),
    ]
