"""What goes wrong around a store, and that it is told and repaired."""

import errno
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergekit_lab import InputError
from mergekit_lab.store import Store, content_key
from mergekit_lab.store.lock import FolderLock
from mergekit_lab.store.upkeep import adopt, damages, differences, nearest, older_than, remove, unreadable

CONTENT = {"task": "digits", "training": {"lr": 1e-4, "steps": 9}, "seed": 0}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["mergekit_lab.store", "safetensors.torch"])


def weights(fill: float = 1.0):
    def make(place):
        save_file({"w": torch.full((8, 8), fill)}, place.out / "model.safetensors")
        return {"val_accuracy": fill}

    return make


def _race(root: Path, log: Path) -> None:
    def make(place):
        with log.open("a") as file:
            file.write("made\n")
        time.sleep(0.2)
        return weights()(place)

    Store(root).obtain("experts", CONTENT, make)


@pytest.mark.parametrize("count", [2, 8])
def test_processes_that_race_for_one_expert_make_it_once(tmp_path, count) -> None:
    racers = [FORKS.Process(target=_race, args=(tmp_path / "store", tmp_path / "log")) for _ in range(count)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
        assert racer.exitcode == 0
    assert (tmp_path / "log").read_text() == "made\n"
    assert list((tmp_path / "store/locks").iterdir()) == []


def _make_many(root: Path) -> None:
    for seed in range(1000):
        Store(root).obtain("experts", CONTENT | {"seed": seed}, weights())


def test_killed_at_any_moment_the_next_one_makes_the_same(tmp_path) -> None:
    whole = Store(tmp_path / "whole").obtain("experts", CONTENT, weights()).files
    moments = random.Random(0)
    for number in range(6):
        root = tmp_path / str(number)
        child = FORKS.Process(target=_make_many, args=(root,))
        child.start()
        time.sleep(moments.uniform(0.05, 0.4))
        child.kill()
        child.join()
        store = Store(root)
        done = list(store.artifacts())
        assert damages(done) == []
        for seed in range(len(done) + 1):
            assert store.obtain("experts", CONTENT | {"seed": seed}, weights()).files == whole
        # also of a kill between publishing and letting go, whose lock nobody waits for any more
        assert list((root / "locks").glob("[!.]*")) == []


def test_a_full_disk_is_told_and_what_can_be_resumed_stays(tmp_path) -> None:
    def make(place):
        (place.resume / "last.ckpt").write_text("step 7")
        with (place.out / "model.bin").open("wb") as file:
            file.write(b"x" * (1 << 20))
        return {}

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        with pytest.raises(InputError, match=r"no room for more in the store .*store\.action=prune"):
            Store(tmp_path).obtain("experts", CONTENT, make)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "work/experts" / content_key(CONTENT) / "resume/last.ckpt").read_text() == "step 7"
    assert Store(tmp_path).obtain("experts", CONTENT, make).reused is False


def test_one_whose_lock_was_taken_over_lets_the_other_work_and_has_what_it_made(tmp_path) -> None:
    """As of a process that was suspended: its folder is cleared away under it by the one that took over."""
    store, tries = Store(tmp_path), []
    lock, work = (tmp_path / where / name for where, name in (
        ("locks", f"experts-{content_key(CONTENT)}"), ("work/experts", content_key(CONTENT))))  # fmt: skip

    def make(place):
        tries.append(1)
        shutil.rmtree(lock)
        assert not Store(tmp_path).obtain("experts", CONTENT, weights(2.0)).reused
        return weights(1.0)(place)

    assert store.obtain("experts", CONTENT, make).info["val_accuracy"] == 2.0
    assert len(tries) == 1
    assert not work.exists()


def test_a_folder_that_is_deleted_while_it_is_worked_in_is_named(tmp_path) -> None:
    def make(place):
        shutil.rmtree(place.out.parent)
        return {"size": len((place.out / "model.safetensors").read_bytes())}

    with pytest.raises(InputError, match=r"out-.* was deleted while .*run the same command again"):
        Store(tmp_path).obtain("experts", CONTENT, make)
    assert not Store(tmp_path).obtain("experts", CONTENT, weights()).reused


def test_kinds_on_different_file_systems_are_refused_by_name(tmp_path, monkeypatch) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    real = Path.rename
    monkeypatch.setattr(Path, "rename", lambda *paths: (refuse if "out-" in paths[0].name else real)(*paths))
    with pytest.raises(InputError, match=r"experts lies on another file system .*link the whole store"):
        Store(tmp_path).obtain("experts", CONTENT, weights())


def test_a_store_that_is_read_only_gives_what_it_has_and_says_why_it_takes_nothing(
    tmp_path, monkeypatch
) -> None:
    Store(tmp_path).obtain("experts", CONTENT, weights())

    def refuse(self: FolderLock) -> bool:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(FolderLock, "_take", refuse)
    assert Store(tmp_path).obtain("experts", CONTENT, weights()).reused
    with pytest.raises(InputError, match=r"cannot be written .*Read-only.*set store\.root"):
        Store(tmp_path).obtain("experts", CONTENT | {"seed": 1}, weights())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


def another_model(path: Path) -> None:
    save_file({"w": torch.zeros(8, 8)}, path)


@pytest.mark.parametrize("damage", [truncate, flip, another_model, Path.unlink])
def test_a_damaged_checkpoint_is_named_when_it_is_read_and_by_verify(tmp_path, damage) -> None:
    store = Store(tmp_path)
    made = store.obtain("experts", CONTENT, weights())
    damage(made.folder / "model.safetensors")
    found = store.find("experts", CONTENT)
    with pytest.raises(InputError, match=rf"stored experts {made.key} .*model.safetensors.*delete the folder"):
        found.file("model.safetensors")
    (found,) = damages(store.artifacts())
    assert found.folder == made.folder
    assert made.key in found.told
    shutil.rmtree(made.folder)
    again = store.obtain("experts", CONTENT, weights())
    assert again.files == made.files


def test_a_manifest_of_another_artifact_is_found_by_verify(tmp_path) -> None:
    store = Store(tmp_path)
    made, other = (store.obtain("experts", CONTENT | {"seed": seed}, weights()) for seed in (0, 1))
    shutil.copyfile(other.folder / "manifest.json", made.folder / "manifest.json")
    (found,) = damages(store.artifacts())
    assert f"{made.key} has the manifest of another artifact" in found.told


def test_a_flipped_digit_of_what_an_evaluation_found_is_named(tmp_path) -> None:
    """Its value stands in the manifest alone."""
    store = Store(tmp_path)
    made = store.obtain("evaluations", CONTENT, lambda place: {"value": 0.9125, "by": {3: [1, 2]}})
    assert store.find("evaluations", CONTENT).info["value"] == 0.9125
    manifest = made.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("0.9125", "0.1125"))
    with pytest.raises(InputError, match=f"{made.key} has a damaged manifest .*not as it was published"):
        store.find("evaluations", CONTENT)
    (found,) = damages(unreadable(store))
    assert found.folder == made.folder


def test_a_link_to_nowhere_in_an_artifact_s_place_is_replaced(tmp_path) -> None:
    made = Store(tmp_path).obtain("experts", CONTENT, weights())
    elsewhere = made.folder.rename(tmp_path / "elsewhere")
    made.folder.symlink_to(elsewhere)
    assert Store(tmp_path).find("experts", CONTENT).file("model.safetensors").is_file()
    shutil.rmtree(elsewhere)
    assert not Store(tmp_path).obtain("experts", CONTENT, weights()).reused
    assert not made.folder.is_symlink()


def test_an_artifact_of_an_older_schema_is_sound(tmp_path) -> None:
    made = Store(tmp_path).obtain("experts", CONTENT, weights())
    manifest = json.loads((made.folder / "manifest.json").read_text())
    old = made.folder.rename(made.folder.with_name(content_key(CONTENT, schema=0)))
    del manifest["digest"]  # which it had not yet
    (old / "manifest.json").write_text(json.dumps(manifest | {"schema": 0, "key": old.name}))
    assert Store(tmp_path).find("experts", CONTENT) is None
    assert damages(Store(tmp_path).artifacts()) == []


def test_the_nearest_artifact_and_its_first_difference_say_why_nothing_was_found(tmp_path) -> None:
    store = Store(tmp_path)
    near = store.obtain("experts", CONTENT, weights())
    store.obtain("experts", CONTENT | {"task": "mnist", "seed": 4}, weights())
    wanted = CONTENT | {"training": {"lr": 2e-4, "steps": 9}}
    found, parts = nearest(store, "experts", wanted)
    assert found.key == near.key
    assert [(d.path, d.wanted, d.stored) for d in parts] == [("training.lr", 2e-4, 1e-4)]
    assert nearest(store, "merged", wanted) is None
    assert differences({"a": 1}, {"a": 1, "b": 2})[0].path == "b"
    assert [d.path for d in differences({"lr": 1}, {"lr": 1.0})] == ["lr"], "keys tell them apart"


def test_what_is_removed_is_not_found_and_age_counts_in_days(tmp_path) -> None:
    store = Store(tmp_path)
    made = store.obtain("experts", CONTENT, weights())
    (read,) = store.artifacts()
    assert older_than(read, 0)
    assert not older_than(read, 1)
    assert not older_than(read, 1e23)
    remove(store, read.folder)
    assert store.find("experts", CONTENT) is None
    assert not made.folder.exists()


def exported(tmp_path: Path) -> Path:
    made = Store(tmp_path / "one").obtain("experts", CONTENT, weights())
    shutil.copytree(made.folder, tmp_path / "out")
    return tmp_path / "out"


def test_an_exported_folder_is_the_same_artifact_in_another_store(tmp_path) -> None:
    folder = exported(tmp_path)
    made = adopt(Store(tmp_path / "two"), folder)
    assert made.key == content_key(CONTENT)
    assert made.info["val_accuracy"] == 1.0
    assert torch.equal(torch.tensor(1.0).expand(8, 8), _read(made.file("model.safetensors")))


def _read(path: Path) -> torch.Tensor:
    from mergekit_lab import open_checkpoint

    return open_checkpoint(path)["w"]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_what_is_imported_runs_no_code_and_leaves_its_folder_by_no_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = exported(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (tmp_path / "secret").write_text("x")
    digest = manifest["files"]["model.safetensors"]
    for change, match in (
        ({"files": {"../secret": "0" * 64}}, "outside of its folder"),
        ({"files": {"../out/model.safetensors": digest}}, "outside of its folder"),
        ({"files": {str(folder / "model.safetensors"): digest}}, "outside of its folder"),
        ({"files": {"a\0b": "0" * 64}}, "outside of its folder"),
        ({"info": {"val_accuracy": 0.99}}, "was changed: it is not as it was published"),
        ({"kind": "../../etc"}, "names the kind"),
        ({"schema": 99}, "has schema 99"),
        ({"files": 3}, "cannot be used"),
        ({"info": None}, "cannot be used"),
        ({"content": CONTENT | {"seed": 7}}, "was changed: its content has the key"),
    ):
        (folder / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(InputError, match=match):
            adopt(Store(tmp_path / "two"), folder)
    old = {name: said for name, said in manifest.items() if name != "digest"}
    (folder / "manifest.json").write_text(json.dumps(old | {"files": {"model.safetensors": "0" * 64}}))
    with pytest.raises(InputError, match="is damaged"):
        adopt(Store(tmp_path / "two"), folder)
    (folder / "manifest.json").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError, match="cannot be used"):
        adopt(Store(tmp_path / "two"), folder)
    assert not Path("exploded").exists()
    assert not (tmp_path / "two/experts").exists()
