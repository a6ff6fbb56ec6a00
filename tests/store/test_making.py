"""What goes wrong while an artifact is made: races, kills, full disks, folders that vanish."""

import errno
import multiprocessing
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
from store.weights import CONTENT, KEY, make_weights

from mergekit_lab import InputError
from mergekit_lab.store import Store
from mergekit_lab.store.upkeep import (
    find_damages,
)

FORKS = multiprocessing.get_context("forkserver")


def _obtain_slowly(root: Path, log: Path) -> None:
    def make(workspace):
        with log.open("a") as file:
            file.write("made\n")
        time.sleep(0.2)
        return make_weights()(workspace)

    Store(root).obtain("experts", CONTENT, make)


@pytest.mark.parametrize("count", [2, 8])
def test_processes_that_race_for_one_expert_make_it_once(tmp_path, count) -> None:
    arguments = (tmp_path / "store", tmp_path / "log")
    racers = [FORKS.Process(target=_obtain_slowly, args=arguments) for _ in range(count)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
        assert racer.exitcode == 0
    assert (tmp_path / "log").read_text() == "made\n"
    assert list((tmp_path / "store/locks").iterdir()) == []


def _make_many(root: Path) -> None:
    for seed in range(1000):
        Store(root).obtain("experts", CONTENT | {"seed": seed}, make_weights())


def test_killed_at_any_moment_the_next_one_makes_the_same(tmp_path) -> None:
    whole = Store(tmp_path / "whole").obtain("experts", CONTENT, make_weights()).files
    moments = random.Random(0)
    for number in range(6):
        root = tmp_path / str(number)
        child = FORKS.Process(target=_make_many, args=(root,))
        child.start()
        time.sleep(moments.uniform(0.05, 0.4))
        child.kill()
        child.join()
        store = Store(root)
        done = list(store.list_artifacts())
        assert find_damages(done) == []
        for seed in range(len(done) + 1):
            assert store.obtain("experts", CONTENT | {"seed": seed}, make_weights()).files == whole
        # also of a kill between publishing and letting go, whose lock nobody waits for any more
        assert list((root / "locks").glob("[!.]*")) == []


def test_a_full_disk_is_named_and_what_can_be_resumed_stays(tmp_path) -> None:
    def make(workspace):
        (workspace.resume / "last.ckpt").write_text("step 7")
        with (workspace.out / "model.bin").open("wb") as file:
            file.write(b"x" * (1 << 20))
        return {}

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        with pytest.raises(InputError, match=r"store\.action=prune"):
            Store(tmp_path).obtain("experts", CONTENT, make)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "work/experts" / KEY / "resume/last.ckpt").read_text() == "step 7"
    assert Store(tmp_path).obtain("experts", CONTENT, make).reused is False


def test_one_whose_lock_was_taken_over_lets_the_other_work_and_has_what_it_made(tmp_path) -> None:
    """As of a process that was suspended: its folder is cleared away under it by the one that took over."""
    store, tries = Store(tmp_path), []
    lock, work = (tmp_path / where / name for where, name in (
        ("locks", f"experts-{KEY}"), ("work/experts", KEY)))  # fmt: skip

    def make(workspace):
        tries.append(1)
        shutil.rmtree(lock)
        assert not Store(tmp_path).obtain("experts", CONTENT, make_weights(2.0)).reused
        return make_weights(1.0)(workspace)

    assert store.obtain("experts", CONTENT, make).info["val_accuracy"] == 2.0
    assert len(tries) == 1
    assert not work.exists()


def test_a_folder_that_is_deleted_while_it_is_worked_in_is_named(tmp_path) -> None:
    def make(workspace):
        shutil.rmtree(workspace.out.parent)
        return {"size": len((workspace.out / "model.safetensors").read_bytes())}

    with pytest.raises(InputError, match=r"out-.* was deleted"):
        Store(tmp_path).obtain("experts", CONTENT, make)
    assert not Store(tmp_path).obtain("experts", CONTENT, make_weights()).reused


def test_kinds_on_different_file_systems_are_refused_by_name(tmp_path, monkeypatch) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    real = Path.rename
    monkeypatch.setattr(Path, "rename", lambda *paths: (refuse if "out-" in paths[0].name else real)(*paths))
    with pytest.raises(InputError, match="experts is on another"):
        Store(tmp_path).obtain("experts", CONTENT, make_weights())


def test_a_store_that_is_read_only_gives_what_it_has_and_says_why_it_takes_nothing(
    tmp_path, monkeypatch
) -> None:
    Store(tmp_path).obtain("experts", CONTENT, make_weights())

    def refuse(self: Path, *arguments, **named) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert Store(tmp_path).obtain("experts", CONTENT, make_weights()).reused
    with pytest.raises(InputError, match=r"Read-only.*store\.root"):
        Store(tmp_path).obtain("experts", CONTENT | {"seed": 1}, make_weights())
