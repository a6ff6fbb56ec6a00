from pathlib import Path

import pytest
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
