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
