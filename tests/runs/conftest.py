from pathlib import Path
from unittest.mock import patch

import pytest
from backbone import make_small, write_small
from composing import _no_hydra_left_behind as _no_hydra_left_behind
from composing import session_store as session_store
from language import save_tiny


@pytest.fixture(scope="session")
def small_backbone(tmp_path_factory) -> Path:
    return write_small(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module", autouse=True)
def _small_backbone(small_backbone):
    """And files that a crash of the machine may lose, which takes the disk's time."""
    with make_small(small_backbone), patch("mergekit_lab.store.store.sync_to_disk"):
        yield


@pytest.fixture(scope="module")
def module_store(tmp_path_factory) -> Path:
    """One store, so that experiments that share experts train them once."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Tiny language models by architecture."""
    return {name: save_tiny(tmp_path_factory.mktemp(name), name) for name in ("llama", "t5")}
