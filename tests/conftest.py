"""Fixtures of all rooms. Heavy imports are in functions: the process that hands tests out needs none."""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from golden import Golden
    from tiny import TinyEncoder
    from torch import Tensor

gc.disable()  # imports and collection make a million objects, which stay


def pytest_collection_finish() -> None:
    from programs import share_imports

    share_imports()
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000)


@pytest.fixture
def encoder() -> TinyEncoder:
    from tiny import TinyEncoder

    return TinyEncoder()


@pytest.fixture(scope="session")
def head() -> Tensor:
    import torch

    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def golden() -> Golden:
    from golden import Golden

    return Golden()


@pytest.fixture(scope="module", autouse=True)
def _pictures_of_one_pixel():
    """Modules that look at pictures have a fixture of this name that does nothing."""
    from pictures import leave_undrawn

    with leave_undrawn():
        yield


ACCEPTED_SKIPS = re.compile("no Chromium on this machine|renameat2 is Linux's|cores cannot be taken away here")
"""Reasons that lie in the machine. What is not installed is no reason where everything is."""
_skips: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strict-skips", action="store_true", help="fail on a skip without a good reason")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skips[report.nodeid] = report.longrepr[2]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skips[report.nodeid] = report.longrepr[2]


def find_odd_skips() -> dict[str, str]:
    return {test: reason for test, reason in _skips.items() if not ACCEPTED_SKIPS.search(reason)}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--strict-skips") and find_odd_skips() and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if config.getoption("--strict-skips"):
        for test, reason in find_odd_skips().items():
            terminalreporter.write_line(f"skipped, which fails this run: {test} ({reason})", red=True)


_FIRST = (
    *("end_to_end", "runs", "training/test_captured", "plugins"),
    *("training", "commands", "reporting", "test_", "merging"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first: at the end, no process waits long for another's last file."""

    def rank(item: pytest.Item) -> int:
        name = item.nodeid.removeprefix("tests/")
        return next((rank for rank, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))

    items.sort(key=rank)
