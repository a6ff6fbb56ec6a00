"""Which tensors of a merge are worked on together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mergekit_lab.merging.blocks import Reader
from mergekit_lab.merging.contract import Method
from mergekit_lab.merging.spectral import SpectralMethod

STACK_BYTES = 1 << 30
"""Task vectors that an accelerator factorizes in one call, or keeps from one pass over a tensor to the next."""


def plan_jobs(reader: Reader) -> list[list[str]]:
    """The merged tensors in groups that are worked on together.

    They are the same however many devices share them: a matrix is rounded otherwise in a stack of another size.
    """
    names: Sequence[str] = reader.inputs.merged
    specs = reader.inputs.base.specs
    method = reader.method
    if reader.device.type == "cpu":
        if isinstance(method, SpectralMethod):  # the cheapest first: a bar moves at once
            names = sorted(names, key=lambda name: count_work(method, name, specs[name].shape))
        return [[name] for name in names]
    if isinstance(method, SpectralMethod):
        groups: dict[object, list[str]] = {}
        others: list[str] = []
        for name in names:
            shape = specs[name].shape
            if name in reader.inputs.stacks:
                groups[name] = [name]
            elif method.is_matrix(name, shape):
                groups.setdefault((shape, name in reader.inputs.transposed), []).append(name)
            else:
                others.append(name)
        stacks = []
        for members in groups.values():
            step = count_members(reader, specs[members[0]].numel)
            stacks += [members[start : start + step] for start in range(0, len(members), step)]

        def work(part: list[str]) -> int:
            shape = specs[part[0]].shape
            return len(part) * math.prod(shape) * min(shape[-2:])

        # the longest first, or several devices would wait for the one that has it
        return [*sorted(stacks, key=work, reverse=True), *_pool(others, reader)]
    return _pool(names, reader) if reader.pools else [[name] for name in names]


def count_members(reader: Reader, entries: int) -> int:
    """Matrices of so many entries that are factorized together."""
    size = 4 * len(reader.experts) * entries
    return 1 if reader.device.type == "cpu" else max(1, STACK_BYTES // max(1, size))


def count_work(method: Method, name: str, shape: Sequence[int]) -> int:
    """What a tensor costs next to others of the same merge.

    A factorization reduces to the square of the smaller side, and works on that three times as long.
    """
    size = math.prod(shape)
    if not isinstance(method, SpectralMethod) or not method.is_matrix(name, shape):
        return size
    small = min(shape[-2:])
    return small * size + 3 * small**2 * size // max(*shape[-2:], 1)


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
