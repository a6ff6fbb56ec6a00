"""Which tensors of a merge are worked on together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from mergekit_lab.merging.blocks import Reader
from mergekit_lab.merging.contract import Method
from mergekit_lab.merging.spectral import SpectralMethod

STACK_BYTES = 1 << 30
"""Task vectors that an accelerator factorizes in one call, or keeps from one pass over a tensor to the next."""


def plan_jobs(reader: Reader) -> list[list[str]]:
    """The merged tensors in groups that are worked on together.

    They are the same however many devices share them: a matrix is rounded otherwise in a stack of another size.
    """
    names, specs = reader.inputs.merged, reader.inputs.base.specs
    method = reader.method
    if reader.device.type == "cpu":
        return [[name] for name in _order(names, reader)]
    if isinstance(method, SpectralMethod):
        alone = [[name] for name in names if name in reader.inputs.stacks]
        groups: dict[tuple[tuple[int, ...], bool], list[str]] = {}
        others: list[str] = []
        for name in names:
            if name in reader.inputs.stacks:
                continue
            shape = specs[name].shape
            alike = shape, name in reader.inputs.transposed
            (groups.setdefault(alike, []) if method.is_matrix(name, shape) else others).append(name)
        experts = len(reader.experts)
        stacks = [
            list(part)
            for (shape, _), members in groups.items()
            for part in _chunk(members, STACK_BYTES // (4 * experts * max(1, math.prod(shape))))
        ]

        def work(part: list[str]) -> int:
            shape = specs[part[0]].shape
            return len(part) * math.prod(shape) * min(shape[-2:])

        # the longest first, or several devices would wait for the one that has it
        return [*sorted([*stacks, *alone], key=work, reverse=True), *_pool(others, reader)]
    return _pool(names, reader) if reader.pools else [[name] for name in names]


def count_work(method: Method, name: str, shape: Sequence[int]) -> int:
    """What a tensor costs next to others of the same merge.

    A factorization reduces to the square of the smaller side, and works on that three times as long.
    """
    size = math.prod(shape)
    if not isinstance(method, SpectralMethod) or not method.is_matrix(name, shape):
        return size
    small = min(shape[-2:])
    return small * size + 3 * small**2 * size // max(*shape[-2:], 1)


def _order(names: Sequence[str], reader: Reader) -> Sequence[str]:
    """Where tensors are factorized the cheapest first: a bar moves at once, and has a pace by the longest."""
    if not isinstance(reader.method, SpectralMethod):
        return names
    specs = reader.inputs.base.specs
    return sorted(names, key=lambda name: count_work(reader.method, name, specs[name].shape))


def _pool(names: Sequence[str], reader: Reader) -> list[list[str]]:
    """Neighbors together up to a block's size."""
    specs = reader.inputs.base.specs
    jobs: list[list[str]] = []
    room = 0
    for name in names:
        size = specs[name].numel
        if size > room or not jobs:
            jobs.append([])
            room = reader.block
        jobs[-1].append(name)
        room -= size
    return jobs


def _chunk(names: list[str], size: int) -> Iterator[tuple[str, ...]]:
    iterator = iter(names)
    while part := tuple(islice(iterator, max(1, size))):
        yield part
