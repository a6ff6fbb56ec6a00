"""Compute the next results in threads while earlier ones are used."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch(
    function: Callable[[Item], Result], items: Iterable[Item], *, ahead: int, threads: int = 1
) -> Generator[Result]:
    """`function(item)` for every item, in order. The first calls begin at once.

    Items are drawn in the consumer's thread, one for each result that it takes. An exception is raised in place
    of its result. If the consumer closes or drops the generator, calls that have not begun are canceled, and
    running ones are waited for.

    Args:
        function: called in another thread, in which torch uses one thread.
        items: may be endless.
        ahead: calls that run or wait beyond the result in use, at least 1.
        threads: calls that run at a time.
    """
    own: set[int] = set()

    def begin() -> None:
        torch.set_num_threads(1)
        own.add(threading.get_ident())

    def yield_results() -> Generator[Any]:
        pool = ThreadPoolExecutor(threads, "prefetch", initializer=begin)
        try:
            coming = (pool.submit(function, item) for item in items)
            flying = deque(islice(coming, ahead))
            yield None
            while flying:
                first = flying.popleft()
                flying.extend(islice(coming, 1))
                yield first.result()
        finally:  # garbage collection may close this in one of the pool's own threads, which cannot wait
            pool.shutdown(wait=threading.get_ident() not in own, cancel_futures=True)

    begun = yield_results()
    next(begun)
    return begun
