"""Results come in order, some calls ahead, and nothing is left running."""

import gc
import threading
import time
from itertools import count

import pytest

from mergekit_lab.prefetch import prefetch


@pytest.mark.parametrize("threads", [1, 4])
def test_results_come_in_the_order_of_the_items(threads) -> None:
    def wait_and_square(n: int) -> int:
        time.sleep(0.002 * (n % 3))
        return n * n

    assert list(prefetch(wait_and_square, range(20), ahead=5, threads=threads)) == [n * n for n in range(20)]


def test_it_begins_at_once_and_stays_as_far_ahead_as_it_was_told_to() -> None:
    drawn: list[int] = []

    def yield_items():
        for n in count():
            drawn.append(n)
            yield n

    results = prefetch(lambda n: n, yield_items(), ahead=3)
    assert drawn == [0, 1, 2]
    for n in range(5):
        assert next(results) == n
        assert drawn == list(range(n + 4))
    results.close()


def test_items_are_drawn_in_the_consumer_s_thread_and_worked_on_in_another() -> None:
    drawn_in = []

    def yield_items():
        for n in range(4):
            drawn_in.append(threading.get_ident())
            yield n

    worked_in = set(prefetch(lambda n: threading.get_ident(), yield_items(), ahead=2))
    assert set(drawn_in) == {threading.get_ident()}
    assert worked_in.isdisjoint(drawn_in)


def test_an_error_comes_out_where_its_result_would_have() -> None:
    results = prefetch(lambda n: 1 // (2 - n), range(9), ahead=4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(results) == []


def test_an_error_of_the_items_comes_out_and_what_has_begun_is_waited_for() -> None:
    ended = []

    def yield_items():
        yield 0
        raise OSError("gone")

    def work(n: int) -> None:
        time.sleep(0.05)
        ended.append(n)

    with pytest.raises(OSError, match="gone"):
        prefetch(work, yield_items(), ahead=2)
    assert ended == [0]


@pytest.mark.parametrize("leave", ["close", "forget", "forget before the first"])
def test_a_consumer_that_leaves_ends_the_threads_and_drops_what_has_not_begun(leave) -> None:
    begun, ended = [], []

    def work(n: int) -> int:
        begun.append(n)
        time.sleep(0.02)
        ended.append(n)
        return n

    before = threading.active_count()
    results = prefetch(work, count(), ahead=8)
    if leave != "forget before the first":
        assert next(results) == 0
    if leave == "close":
        results.close()
    del results
    gc.collect()
    assert threading.active_count() == before
    assert begun == ended
    assert len(begun) < 8
