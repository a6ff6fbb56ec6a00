"""Plan which tensors of a merge are worked on together, and run these jobs by workers on each device."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import nullcontext
from dataclasses import replace
from queue import SimpleQueue

import torch
from torch import Tensor

from mergekit_lab.errors import InputError, join_names, say_error
from mergekit_lab.machine import count_cores
from mergekit_lab.merging.blocks import Reader
from mergekit_lab.merging.contract import Method
from mergekit_lab.merging.spectral import SpectralMethod

STACK_BYTES = 1 << 30
"""Bytes of task vectors that an accelerator factorizes in one call, or keeps between two passes."""


def plan_jobs(reader: Reader) -> list[list[str]]:
    """The merged tensors in groups that are worked on together.

    The groups do not depend on the number of devices, because a matrix is rounded differently in a stack of
    another size.
    """
    names: Sequence[str] = reader.inputs.merged
    specs = reader.inputs.base.specs
    method = reader.method
    if reader.device.type == "cpu":
        if isinstance(method, SpectralMethod):  # the cheapest first, so that a progress bar moves at once
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

        # the longest first, else several devices would wait for the one that works on it
        return [*sorted(stacks, key=work, reverse=True), *_pool(others, reader)]
    return _pool(names, reader) if reader.pools else [[name] for name in names]


def count_members(reader: Reader, entries: int) -> int:
    """How many matrices with so many entries are factorized together."""
    size = 4 * len(reader.experts) * entries
    return 1 if reader.device.type == "cpu" else max(1, STACK_BYTES // max(1, size))


def count_work(method: Method, name: str, shape: Sequence[int]) -> int:
    """A tensor's cost, relative to others of the same merge.

    A factorization first reduces a matrix to a square of its smaller side, then works three times as long on
    each entry of that.
    """
    size = math.prod(shape)
    if not isinstance(method, SpectralMethod) or not method.is_matrix(name, shape):
        return size
    small = min(shape[-2:])
    return small * size + 3 * small**2 * size // max(*shape[-2:], 1)


def _pool(names: Sequence[str], reader: Reader) -> list[list[str]]:
    """Group neighbors up to a block's size."""
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


Results = list[tuple[str, Tensor]]
Job = Callable[[Reader, list[str]], Results]


def _attempt(run: Job, reader: Reader, names: list[str]) -> Results:
    """Run a job. If LAPACK gives up, the error names the job's tensors."""
    try:
        return run(reader, names)
    except torch.linalg.LinAlgError as error:
        reader.settle()
        raise InputError(
            f"{join_names(names)} cannot be factorized: the task vectors or side inputs are too large, or too "
            f"far apart in size, for float64 ({say_error(error)})"
        ) from None


def run_jobs(readers: list[Reader], run: Job) -> Iterator[Results]:
    """The jobs' results as they finish. A device has several workers if one cannot keep it busy."""
    jobs = plan_jobs(readers[0])
    counts = [count_workers(each) for each in readers]
    readers = [
        replace(each) if number else each
        for number in range(max(counts))
        for each, count in zip(readers, counts, strict=True)
        if number < count
    ]
    if len(readers) == 1:
        yield from _run_alone(readers[0], jobs, run)
        return
    free: SimpleQueue[tuple[Reader, torch.cuda.Stream | None]] = SimpleQueue()
    for reader in readers:
        free.put((reader, _open_stream(reader)))

    def work(job: list[str]) -> Results:
        reader, stream = free.get()
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                result = _attempt(run, reader, job)
                reader.settle()
                return result
        finally:
            free.put((reader, stream))

    with ThreadPoolExecutor(len(readers), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        flying: set[Future[Results]] = set()
        try:
            for job in jobs:
                flying.add(pool.submit(work, job))
                if len(flying) > len(readers) + 1:
                    done, flying = wait(flying, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in as_completed(flying))
        finally:
            for future in flying:
                future.cancel()


def _open_stream(reader: Reader) -> torch.cuda.Stream | None:
    """A CUDA stream of its own for a worker that the host feeds.

    In a shared stream, its transfers would wait for the arithmetic of the device's other workers. The device is
    synchronized first, because the survey was made in another stream.
    """
    if not reader.fed or reader.device.type != "cuda":
        return None
    torch.cuda.synchronize(reader.device)
    return torch.cuda.Stream(reader.device)


def _run_alone(reader: Reader, jobs: list[list[str]], run: Job) -> Iterator[Results]:
    """Run all jobs by one worker. It settles only every few jobs, so that an accelerator always has work."""
    every = 1 if reader.device.type == "cpu" else _UNSETTLED
    for number, job in enumerate(jobs, start=1):
        result = _attempt(run, reader, job)
        if number % every == 0 or number == len(jobs):
            reader.settle()
        yield result


_UNSETTLED = 8
"""Jobs that an accelerator gets between two checks of their inputs."""


def count_workers(reader: Reader) -> int:
    """The number of workers, which are threads, on one device.

    Elementwise methods have one for each core of a CPU, because torch's own threads would wait for each other.
    An accelerator that the host feeds has several, so that reading and arithmetic overlap.
    """
    if reader.inputs.computed:
        return 1
    cores = count_cores()
    if reader.device.type == "cpu":
        return max(1, min(torch.get_num_threads(), cores)) if reader.method.elementwise else 1
    if not reader.fed:
        return 1
    if reader.method.elementwise:
        return min(FEEDERS, cores)
    return min(_READERS, cores) if isinstance(reader.method, SpectralMethod) else 1


FEEDERS = 8
"""Workers that feed an accelerator: one copies 2 to 6 GB/s from the host's memory, and the card takes 50."""


_READERS = 3
"""Workers of a matrix method: one factorizes while the others read the next stacks and write the last."""
