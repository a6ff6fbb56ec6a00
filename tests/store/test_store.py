"""An artifact is whole or absent, made once, and named by its content alone."""

import json
import os
import time
from pathlib import Path

import pytest

from mergekit_lab import InputError
from mergekit_lab.store import Store, make_key

CONTENT = {"task": "digits", "lr": 1e-4, "seed": 0}


def make_maker(calls: list, text: str = "weights"):
    def make(workspace):
        calls.append(1)
        (workspace.out / "model.txt").write_text(text)
        return {"accuracy": 0.5}

    return make


def test_the_key_ignores_the_order_of_keys_and_nothing_else() -> None:
    assert make_key(CONTENT) == make_key(dict(reversed(CONTENT.items())))
    for name, value in {"task": "mnist", "lr": 2e-4, "seed": 1}.items():
        assert make_key(CONTENT | {name: value}) != make_key(CONTENT)
    assert make_key(CONTENT | {"order": ["a", "b"]}) != make_key(CONTENT | {"order": ["b", "a"]})


@pytest.mark.parametrize("value", [float("nan"), Path("x"), object()])
def test_content_that_json_cannot_hold_names_nothing(value) -> None:
    with pytest.raises(InputError, match="cannot name an artifact"):
        make_key({"value": value})


def test_what_exists_is_found_and_not_made_again(tmp_path) -> None:
    store, calls = Store(tmp_path), []
    assert store.find("experts", CONTENT) is None
    first = store.obtain("experts", CONTENT, make_maker(calls))
    second = Store(tmp_path).obtain("experts", CONTENT, make_maker(calls))
    assert len(calls) == 1
    assert (first.reused, second.reused) == (False, True)
    assert second.info["accuracy"] == 0.5
    assert second.find_file("model.txt").read_text() == "weights"


def test_the_manifest_explains_the_artifact(tmp_path) -> None:
    artifact = Store(tmp_path).obtain("experts", CONTENT, make_maker([]))
    manifest = json.loads(artifact.find_file("manifest.json").read_text())
    assert manifest["content"] == CONTENT
    assert set(manifest["files"]) == {"model.txt"}
    assert len(manifest["files"]["model.txt"]) == 64
    assert manifest["versions"]["torch"]


def test_a_maker_that_fails_publishes_nothing_and_finds_its_resume_files_again(tmp_path) -> None:
    store = Store(tmp_path)

    def die(workspace):
        (workspace.resume / "last.ckpt").write_text("step 7")
        (workspace.out / "model.txt").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        store.obtain("experts", CONTENT, die)
    assert store.find("experts", CONTENT) is None

    def go_on(workspace):
        assert (workspace.resume / "last.ckpt").read_text() == "step 7"
        assert list(workspace.out.iterdir()) == []
        return {}

    store.obtain("experts", CONTENT, go_on)
    assert not (tmp_path / "work" / "experts" / make_key(CONTENT)).exists()


def test_seconds_of_earlier_tries_count_up_to_what_each_left_to_resume_from(tmp_path) -> None:
    store = Store(tmp_path)

    def stop_after(seconds):
        def make(workspace):
            begun = time.time() - seconds  # fifty years: the clock stood at 1970
            os.utime(workspace.resume.parent / "begun.json", (begun, begun))
            if seconds:
                (workspace.resume / "last.ckpt").write_text("")
            raise RuntimeError("killed")

        return make

    for seconds in (100, 0, 50, 50 * 365 * 86400):
        with pytest.raises(RuntimeError):
            store.obtain("experts", CONTENT, stop_after(seconds))
    assert store.obtain("experts", CONTENT, make_maker([])).info["wall_seconds"] == pytest.approx(150, abs=9)
    assert store.obtain("experts", {}, make_maker([])).info["wall_seconds"] < 9


def test_a_store_that_cannot_be_written_says_so(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"set store\.root"):
        Store(tmp_path / "file").obtain("experts", CONTENT, make_maker([]))


def test_a_folder_without_a_manifest_is_replaced(tmp_path) -> None:
    store, calls = Store(tmp_path), []
    artifact = store.obtain("experts", CONTENT, make_maker(calls))
    artifact.find_file("manifest.json").unlink()
    again = store.obtain("experts", CONTENT, make_maker(calls))
    assert len(calls) == 2
    assert again.find_file("model.txt").read_text() == "weights"
