from pathlib import Path
from unittest.mock import patch

import pytest
from backbone import make_small, write_small
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig


@pytest.fixture(autouse=True)
def _no_hydra_left_behind():
    yield
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


@pytest.fixture(scope="session")
def session_store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def small_backbone(tmp_path_factory) -> Path:
    return write_small(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module", autouse=True)
def _small_backbone(small_backbone):
    """And files that a crash of the machine may lose, which takes the disk's time."""
    with make_small(small_backbone), patch("mergekit_lab.store.store.sync_to_disk"):
        yield
