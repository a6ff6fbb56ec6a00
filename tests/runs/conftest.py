import base64
from pathlib import Path
from typing import Any

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


_ONE_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module", autouse=True)
def _pictures_of_one_pixel():
    """Matplotlib takes a third of a small run's time. What is drawn, other tests look at: in tests/reporting,
    and in `test_analyze`, where this fixture does nothing.
    """

    def save(figure: Any, path: Any, **_: Any) -> None:
        Path(path).write_bytes(_ONE_PIXEL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", save)
        yield
