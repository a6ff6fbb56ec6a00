"""Sizes and times as messages say them."""

import pytest

from mergekit_lab.errors import say_bytes, say_duration


def test_no_size_is_said_to_be_nothing():
    assert [say_bytes(size) for size in (0, 99, 4_000, 99_999, 123_456, 2.5e8, 7.1e9)] == [
        "0 bytes", "99 bytes", "4.0 kB", "100.0 kB", "0.12 MB", "0.25 GB", "7.1 GB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
    ],
)
def test_durations(seconds, text):
    assert say_duration(seconds) == text
