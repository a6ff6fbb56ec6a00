"""A folder of another store becomes an artifact of this one, or is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from store.weights import CONTENT, KEY, make_weights
from tasks.test_decoding import HOSTILE

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.store import Store
from mergekit_lab.store.upkeep import adopt


def export(tmp_path: Path) -> Path:
    artifact = Store(tmp_path / "one").obtain("experts", CONTENT, make_weights())
    shutil.copytree(artifact.folder, tmp_path / "out")
    return tmp_path / "out"


def test_an_exported_folder_is_the_same_artifact_in_another_store(tmp_path) -> None:
    folder = export(tmp_path)
    artifact = adopt(Store(tmp_path / "two"), folder)
    assert artifact.key == KEY
    assert artifact.info["val_accuracy"] == 1.0
    weights = open_checkpoint(artifact.find_file("model.safetensors"))
    assert torch.equal(torch.tensor(1.0).expand(8, 8), weights["w"])


def test_what_is_imported_runs_no_code_and_leaves_its_folder_by_no_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = export(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (tmp_path / "secret").write_text("x")
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    digest = manifest["files"]["model.safetensors"]
    for change, match in (
        ({"files": {"../secret": "0" * 64}}, "outside of its folder"),
        ({"files": {"../out/model.safetensors": digest}}, "outside of its folder"),
        ({"files": {str(folder / "model.safetensors"): digest}}, "outside of its folder"),
        ({"files": {"a\0b": "0" * 64}}, "outside of its folder"),
        ({"files": {"a" * 5000: "0" * 64}}, "outside of its folder|cannot be read"),
        ({"files": {"loop/x": "0" * 64}}, "outside of its folder|cannot be read"),
        ({"files": {"manifest.json": "0" * 64}}, "outside of its folder"),
        ({"files": {"pipe": "0" * 64}}, "is a pipe or a device"),
        ({"kind": "locks"}, "names the kind"),
        ({"info": {"val_accuracy": 0.99}}, "it is not as"),
        ({"kind": "../../etc"}, "names the kind"),
        ({"schema": 99}, "has schema 99"),
        ({"files": 3}, "cannot be used"),
        ({"info": None}, "cannot be used"),
        ({"content": CONTENT | {"seed": 7}}, "its content has the"),
    ):
        changed = manifest | change
        if "files" in change:
            del changed["digest"]
        (folder / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(InputError, match=match):
            adopt(Store(tmp_path / "two"), folder)
    old = {name: value for name, value in manifest.items() if name != "digest"}
    (folder / "manifest.json").write_text(json.dumps(old | {"files": {"model.safetensors": "0" * 64}}))
    with pytest.raises(InputError, match="is damaged"):
        adopt(Store(tmp_path / "two"), folder)
    (folder / "manifest.json").write_bytes(HOSTILE)
    with pytest.raises(InputError, match="cannot be used"):
        adopt(Store(tmp_path / "two"), folder)
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(InputError, match="cannot be used"):
        adopt(Store(tmp_path / "two"), folder)
    assert not Path("exploded").exists()
    assert not (tmp_path / "two/experts").exists()
