from pathlib import Path

import pytest
from checkpoints.models import make_llama, save, tune
from composing import _no_hydra_left_behind as _no_hydra_left_behind
from composing import session_store as session_store


@pytest.fixture(scope="module")
def three_models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    save(make_llama(layers=4), folder / "base")
    for seed, name in enumerate("abc", 1):
        save(tune(make_llama(layers=4), seed), folder / name)
    return folder


@pytest.fixture
def folder(three_models, monkeypatch) -> Path:
    """The working folder, with models that recipes merge."""
    monkeypatch.chdir(three_models)
    return three_models
