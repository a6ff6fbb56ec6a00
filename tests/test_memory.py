"""What does not fit is made smaller, and told."""

import logging

import pytest
import torch

from mergekit_lab.errors import InputError
from mergekit_lab.memory import fit_memory

WORDS = {"what": "evaluating mnist", "setting": "evaluation_batch_size", "way_out": "set device=cpu"}


def limit_memory(limit: int, tried: list[int]):
    def work(size: int) -> str:
        tried.append(size)
        if size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return f"done with {size}"

    return work


def test_what_fits_is_done_once_and_nothing_is_said(caplog) -> None:
    tried: list[int] = []
    with caplog.at_level(logging.INFO):
        assert fit_memory(limit_memory(8, tried), 8, **WORDS) == ("done with 8", 8)
    assert tried == [8]
    assert caplog.text == ""


def test_the_size_is_halved_until_it_fits(caplog) -> None:
    tried: list[int] = []
    assert fit_memory(limit_memory(3, tried), 25, **WORDS) == ("done with 3", 3)
    assert tried == [25, 12, 6, 3]
    assert "with evaluation_batch_size=25: trying 12" in caplog.text


def test_the_next_size_may_be_another_than_half() -> None:
    tried: list[int] = []
    result = fit_memory(
        lambda n: limit_memory(4, tried)(16 // n), 1, smaller=lambda n: 2 * n if n < 16 else None, **WORDS
    )
    assert result == ("done with 4", 4)
    assert tried == [16, 8, 4]


def test_one_that_does_not_fit_says_what_to_do() -> None:
    with pytest.raises(InputError, match=r"size=1.*allocate 2 GiB\).*device=cpu") as caught:
        fit_memory(limit_memory(0, []), 2, **WORDS)
    assert caught.value.__cause__ is None


def test_other_errors_come_out() -> None:
    with pytest.raises(ZeroDivisionError):
        fit_memory(lambda size: size // 0, 2, **WORDS)
