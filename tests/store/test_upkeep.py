"""What goes wrong around a store, and that it is told and repaired."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from store.weights import CONTENT, KEY, make_weights

from mergekit_lab import InputError
from mergekit_lab.store import Store, artifact, make_key
from mergekit_lab.store.upkeep import (
    adopt,
    find_damages,
    find_half_made,
    find_nearest,
    find_unreadable,
    is_older,
    list_differences,
    measure_size,
    remove,
)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


def write_another_model(path: Path) -> None:
    save_file({"w": torch.zeros(8, 8)}, path)


@pytest.mark.parametrize("damage", [truncate, flip, write_another_model, Path.unlink])
def test_a_damaged_checkpoint_is_named_when_it_is_read_and_by_verify(tmp_path, damage) -> None:
    store = Store(tmp_path)
    stored = store.obtain("experts", CONTENT, make_weights())
    damage(stored.folder / "model.safetensors")
    artifact = store.find("experts", CONTENT)
    with pytest.raises(
        InputError, match=rf"stored experts {stored.key} .*model.safetensors.*delete the folder"
    ):
        artifact.find_file("model.safetensors")
    (artifact,) = find_damages(store.list_artifacts())
    assert artifact.folder == stored.folder
    assert stored.key in artifact.message
    shutil.rmtree(stored.folder)
    again = store.obtain("experts", CONTENT, make_weights())
    assert again.files == stored.files


def test_what_a_process_published_is_hashed_once_unless_it_changes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("mergekit_lab.digests.TICK", 0)
    hashed, file_digest = [], hashlib.file_digest

    def count(file, *rest):
        hashed.append(file)
        return file_digest(file, *rest)

    monkeypatch.setattr(hashlib, "file_digest", count)
    stored = Store(tmp_path).obtain("experts", CONTENT, make_weights())
    file = stored.find_file("model.safetensors")
    assert len(hashed) == 1
    os.utime(file, (1, 1))
    for _ in range(2):
        stored.find_file("model.safetensors")
    assert len(hashed) == 2
    flip(file)
    with pytest.raises(InputError, match="is damaged"):
        stored.find_file("model.safetensors")


def test_a_manifest_of_another_artifact_is_named_by_whoever_reads_it(tmp_path) -> None:
    store = Store(tmp_path)
    artifact, other = (store.obtain("experts", CONTENT | {"seed": seed}, make_weights()) for seed in (0, 1))
    shutil.copyfile(other.folder / "manifest.json", artifact.folder / "manifest.json")
    (damage,) = find_damages(store.list_artifacts())
    assert f"{artifact.key} has the manifest of another artifact" in damage.message
    with pytest.raises(InputError, match=f"{artifact.key} has a damaged manifest .*another artifact's"):
        store.find("experts", CONTENT | {"seed": 0})


def test_a_flipped_digit_of_what_an_evaluation_found_is_named(tmp_path) -> None:
    """Its value stands in the manifest alone."""
    store = Store(tmp_path)
    artifact = store.obtain("evaluations", CONTENT, lambda workspace: {"value": 0.9125, "by": {3: [1, 2]}})
    assert store.find("evaluations", CONTENT).info["value"] == 0.9125
    manifest = artifact.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("0.9125", "0.1125"))
    with pytest.raises(InputError, match=f"{artifact.key} .*manifest .*not as it was"):
        store.find("evaluations", CONTENT)
    (damage,) = find_damages(find_unreadable(store))
    assert damage.folder == artifact.folder


def test_a_link_to_nowhere_in_an_artifact_s_place_is_replaced(tmp_path) -> None:
    artifact = Store(tmp_path).obtain("experts", CONTENT, make_weights())
    elsewhere = artifact.folder.rename(tmp_path / "elsewhere")
    artifact.folder.symlink_to(elsewhere)
    assert Store(tmp_path).find("experts", CONTENT).find_file("model.safetensors").is_file()
    shutil.rmtree(elsewhere)
    assert not Store(tmp_path).obtain("experts", CONTENT, make_weights()).reused
    assert not artifact.folder.is_symlink()


def test_an_artifact_of_an_older_schema_is_sound(tmp_path) -> None:
    artifact = Store(tmp_path).obtain("experts", CONTENT, make_weights())
    manifest = json.loads((artifact.folder / "manifest.json").read_text())
    old = artifact.folder.rename(artifact.folder.with_name(make_key(CONTENT, schema=0)))
    del manifest["digest"]  # which it had not yet
    (old / "manifest.json").write_text(json.dumps(manifest | {"schema": 0, "key": old.name}))
    assert Store(tmp_path).find("experts", CONTENT) is None
    assert find_damages(Store(tmp_path).list_artifacts()) == []


def test_the_nearest_artifact_and_its_first_difference_say_why_nothing_was_found(tmp_path) -> None:
    store = Store(tmp_path)
    near = store.obtain("experts", CONTENT, make_weights())
    store.obtain("experts", CONTENT | {"task": "mnist", "seed": 4}, make_weights())
    wanted = CONTENT | {"training": {"lr": 2e-4, "steps": 9}}
    nearest, parts = find_nearest(store, "experts", wanted)
    assert nearest.key == near.key
    assert [(d.path, d.wanted, d.stored) for d in parts] == [("training.lr", 2e-4, 1e-4)]
    assert find_nearest(store, "merged", wanted) is None
    assert list_differences({"a": 1}, {"a": 1, "b": 2})[0].path == "b"
    assert [d.path for d in list_differences({"lr": 1}, {"lr": 1.0})] == ["lr"], "keys tell them apart"


def test_what_is_removed_is_not_found_and_age_counts_in_days(tmp_path) -> None:
    store = Store(tmp_path)
    artifact = store.obtain("experts", CONTENT, make_weights())
    (read,) = store.list_artifacts()
    assert is_older(read, 0)
    assert not is_older(read, 1)
    assert not is_older(read, 1e23)
    remove(store, read.folder)
    assert store.find("experts", CONTENT) is None
    assert not artifact.folder.exists()


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


STRANGE = [Path.touch, os.mkfifo, link_to_itself, link_to_a_device]
"""What may stand where a folder was."""


@pytest.mark.parametrize("make", [os.mkfifo, link_to_itself, link_to_a_device])
@pytest.mark.parametrize("look", [Store.list_artifacts, find_unreadable], ids=["list", "verify"])
def test_a_kind_that_cannot_be_read_is_named_and_not_taken_for_empty(tmp_path, make, look) -> None:
    Store(tmp_path).obtain("experts", CONTENT, make_weights())
    (tmp_path / "experts").rename(tmp_path / ".away")
    make(tmp_path / "experts")
    with pytest.raises(InputError, match=r"experts cannot be read"):
        list(look(Store(tmp_path)))


def test_a_folder_that_may_not_be_listed_is_named(tmp_path, monkeypatch) -> None:
    Store(tmp_path).obtain("experts", CONTENT, make_weights())
    real = os.listdir

    def refuse(path):
        if Path(path).name == "experts":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(InputError, match=r"\(Permission denied\)"):
        list(find_unreadable(Store(tmp_path)))


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_what_a_user_may_not_read_is_no_damage_that_is_removed(tmp_path, monkeypatch, name) -> None:
    stored = Store(tmp_path).obtain("experts", CONTENT, make_weights())

    def refuse(path, *rest):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(
        artifact, {"manifest.json": "read_file", "model.safetensors": "hash_bytes"}[name], refuse
    )
    with pytest.raises(InputError, match=r"\(Permission denied\)"):
        find_damages(Store(tmp_path).list_artifacts())
    assert stored.folder.is_dir()


def test_what_is_no_kind_beside_the_artifacts_is_left_alone(tmp_path) -> None:
    artifact = Store(tmp_path).obtain("experts", CONTENT, make_weights())
    (tmp_path / "README.txt").write_text("whose store this is")
    (tmp_path / "lost+found").symlink_to("/nowhere")
    (tmp_path / "experts/.nfs0001").write_text("")
    assert [artifact.key for artifact in Store(tmp_path).list_artifacts()] == [artifact.key]
    assert list(find_unreadable(Store(tmp_path))) == []
    (tmp_path / "fits").write_text("a file in a kind's place")
    for look in (Store(tmp_path).list_artifacts, lambda: find_unreadable(Store(tmp_path))):
        with pytest.raises(InputError, match=r"\(Not.*directory\)"):
            list(look())


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("name", ["", "manifest.json", "model.safetensors"])
def test_what_stands_in_an_artifact_s_place_is_named_and_taken_out(tmp_path, make, name) -> None:
    """Nothing waits for a pipe."""
    store = Store(tmp_path)
    artifact = store.obtain("experts", CONTENT, make_weights())
    path = artifact.folder / name
    path.rename(tmp_path / ".away")
    make(path)
    wrong = find_damages([*store.list_artifacts(), *find_unreadable(store)])
    assert {damage.folder for damage in wrong} == {artifact.folder}
    remove(store, artifact.folder)
    assert not os.path.lexists(artifact.folder)
    assert list((tmp_path / "work/removed").iterdir()) == []
    assert not store.obtain("experts", CONTENT, make_weights()).reused


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, link_to_itself])
def test_what_stands_in_an_artifact_s_folder_s_place_is_replaced_by_the_artifact(tmp_path, make) -> None:
    (tmp_path / "experts").mkdir()
    make(tmp_path / "experts" / KEY)
    assert Store(tmp_path).obtain("experts", CONTENT, make_weights()).find_file("model.safetensors").is_file()


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, link_to_itself])
@pytest.mark.parametrize("name", ["experts", "work", "work/experts", "locks", f"work/experts/{KEY}"])
def test_a_file_where_the_store_keeps_a_folder_is_named_before_any_work(tmp_path, make, name) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    make(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name} is not a folder"):
        Store(tmp_path).obtain("experts", CONTENT, lambda workspace: pytest.fail("it was begun"))


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("name", ["resume", "resume/last.ckpt", "resume/shards/0"])
def test_makers_find_nothing_but_files_and_folders_to_resume_from(tmp_path, make, name) -> None:
    path = tmp_path / "work/experts" / KEY / name
    path.parent.mkdir(parents=True)
    make(path)

    def go_on(workspace):
        left = [each for each in workspace.resume.rglob("*") if each.exists()]
        assert all(each.is_file() or each.is_dir() for each in left)
        (workspace.resume / "new").write_text("")
        return {}

    Store(tmp_path).obtain("experts", CONTENT, go_on)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "\ufeff{}", '"\\ud800"', "{", "", "null", "[]", '"x"', "{}"],
    ids=lambda t: t[:5],
)
def test_a_hostile_manifest_is_damage_like_any_other(tmp_path, text) -> None:
    store = Store(tmp_path)
    artifact, other = (store.obtain("experts", CONTENT | {"seed": seed}, make_weights()) for seed in (0, 1))
    (artifact.folder / "manifest.json").write_text(text)
    assert [artifact.key for artifact in store.list_artifacts()] == [other.key]
    (wrong,) = find_damages(find_unreadable(store))
    assert wrong.folder == artifact.folder
    assert "damaged manifest" in wrong.message
    assert len(wrong.message) < 1000
    with pytest.raises(InputError, match=f"{artifact.key} has a damaged manifest.*delete the folder"):
        store.find("experts", CONTENT)
    with pytest.raises(InputError, match=r"manifest.json cannot be used"):
        adopt(store, artifact.folder)


def test_content_that_is_nested_without_end_names_nothing() -> None:
    content: dict = {}
    for _ in range(100_000):
        content = {"a": content}
    with pytest.raises(InputError, match="nested too deep"):
        make_key(content)


def test_a_removal_that_was_cut_is_listed_and_ended_by_the_next(tmp_path) -> None:
    store = Store(tmp_path)
    artifact = store.obtain("experts", CONTENT, make_weights())
    bytes_of_it = measure_size(artifact)
    (tmp_path / "work/removed").mkdir(parents=True)
    artifact.folder.rename(tmp_path / "work/removed/abc")  # and killed here
    (left,) = find_half_made(store)
    assert (left.kind, left.key) == ("removed", "abc")
    assert measure_size(left) == bytes_of_it
    remove(store, left.folder)
    assert list(find_half_made(store)) == []
    assert list((tmp_path / "work/removed").iterdir()) == []


def test_what_another_process_is_at_work_on_is_not_half_made(tmp_path) -> None:
    store = Store(tmp_path)
    store.obtain("experts", CONTENT, lambda workspace: {"seen": len(list(find_half_made(store)))})
    assert store.find("experts", CONTENT).info["seen"] == 0
    (tmp_path / "work/experts" / KEY).mkdir(parents=True)
    (tmp_path / "locks" / f"experts-{KEY}").mkdir()  # its holder is gone
    assert len(list(find_half_made(store))) == 1


@pytest.mark.parametrize("when", [-1e9, 1e12])
def test_times_that_are_no_dates_are_read(tmp_path, when) -> None:
    folder = tmp_path / "work/experts/abc"
    folder.mkdir(parents=True)
    os.utime(folder, (when, when))
    (cut,) = find_half_made(Store(tmp_path))
    assert is_older(cut, 1) == (when < 0)


def test_names_that_a_terminal_would_obey_are_shown_escaped(tmp_path) -> None:
    (tmp_path / "experts" / "a\x1b[2J\udcff").mkdir(parents=True)
    (wrong,) = find_damages(find_unreadable(Store(tmp_path)))
    assert wrong.message.isprintable()
    remove(Store(tmp_path), wrong.folder)
    assert list((tmp_path / "experts").iterdir()) == []


def test_content_and_files_may_have_names_that_are_no_unicode(tmp_path) -> None:
    def make(workspace):
        (workspace.out / "\udcff").write_text("x")
        return {}

    content = CONTENT | {"path": "\udcff", "name": "Ünïcode"}
    artifact = Store(tmp_path).obtain("experts", content, make)
    assert Store(tmp_path).find("experts", content).find_file("\udcff").read_text() == "x"
    assert "Ünïcode" in (artifact.folder / "manifest.json").read_text()
