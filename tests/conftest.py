import pytest
import torch
from tiny import TinyEncoder
from torch import Tensor


@pytest.fixture
def encoder() -> TinyEncoder:
    return TinyEncoder()


@pytest.fixture(scope="session")
def head() -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


_LONG = ("tests/runs", "tests/test_", "tests/reporting", "tests/commands", "tests/training")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes first: at the end, no process waits long for another's last file."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))
