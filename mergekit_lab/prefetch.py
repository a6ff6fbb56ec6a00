"""Work some items ahead, in threads, while the results of earlier ones are used."""

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
    """`function` of every item, in their order. The first calls begin at once.

    Items are drawn in the consumer's thread, when there is room for one more. An error comes out where its
    result would have. Where the consumer closes the generator, or lets go of it, what has not begun is dropped,
    and what has is waited for.

    Args:
        function: called in another thread, where torch uses one thread.
        items: may be endless.
        ahead: calls that are begun or waiting beyond the result in use, at least 1.
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
        finally:  # Python may collect garbage, and close this, in any thread
            pool.shutdown(wait=threading.get_ident() not in own, cancel_futures=True)

    begun = yield_results()
    next(begun)
    return begun
