"""Tiny language models of each kind, saved once."""

import pytest
from language import save_tiny

KINDS = ("llama", "qwen2", "t5")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return {
        architecture: save_tiny(tmp_path_factory.mktemp(architecture), architecture) for architecture in KINDS
    }


@pytest.fixture(params=KINDS)
def architecture(request) -> str:
    return request.param
