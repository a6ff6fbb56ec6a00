from unittest.mock import patch

import pytest
from composing import load_once
from hydra._internal.config_repository import ConfigRepository
from runs.conftest import _no_hydra_left_behind, _small_backbone, small_backbone  # noqa: F401


@pytest.fixture(autouse=True)
def _every_file_read_once():
    with patch.object(ConfigRepository, "load_config", load_once):
        yield
