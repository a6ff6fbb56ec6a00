"""One holder at a time; a lock whose holder is gone is taken over, whatever the clocks say."""

import errno
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from mergekit_lab.store.lock import FolderLock

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["mergekit_lab.store"])


def left_by(path: Path, **owner) -> None:
    """A lock as a process of another host leaves it."""
    path.mkdir()
    (path / "beat").write_text("7")
    (path / "owner.json").write_text(json.dumps({"host": "far/1/x", "pid": 1, "token": "old", **owner}))


def test_threads_hold_it_in_turn(tmp_path) -> None:
    inside, most = [], []

    def work() -> None:
        with FolderLock(tmp_path / "lock", "it", poll=0.01):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert most == [1] * 6
    assert list(tmp_path.iterdir()) == []


def test_another_host_s_lock_without_a_beat_is_taken_over_after_its_time(tmp_path) -> None:
    left_by(tmp_path / "lock")
    begun = time.monotonic()
    with FolderLock(tmp_path / "lock", "it", stale_after=0.6, poll=0.05):
        assert time.monotonic() - begun >= 0.6
        assert json.loads((tmp_path / "lock/owner.json").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("owner", [None, "", '{"host": "far', "[]", "{}"])
def test_a_lock_that_says_of_no_owner_is_taken_over_after_its_time(tmp_path, owner) -> None:
    """A machine that lost its power leaves files that are empty, cut or not there."""
    left_by(tmp_path / "lock")
    (tmp_path / "lock/owner.json").unlink()
    if owner is not None:
        (tmp_path / "lock/owner.json").write_text(owner)
    taken = threading.Event()

    def take() -> None:
        with FolderLock(tmp_path / "lock", "it", stale_after=0.6, poll=0.05):
            taken.set()

    threading.Thread(target=take, daemon=True).start()
    assert not taken.wait(0.4)
    assert taken.wait(5)


@pytest.mark.parametrize("skew", [-1e6, 1e6], ids=["clock behind", "clock ahead"])
def test_a_beating_lock_is_waited_for_though_the_clocks_of_the_hosts_differ(tmp_path, skew) -> None:
    lock = tmp_path / "lock"
    left_by(lock)
    ended = threading.Event()

    def beat() -> None:
        for count in range(100):
            (lock / "beat").write_text(str(count))
            os.utime(lock / "beat", (time.time() + skew, time.time() + skew))
            if ended.wait(0.1):
                return

    holder = threading.Thread(target=beat)
    holder.start()
    taken = threading.Event()

    def take() -> None:
        with FolderLock(lock, "it", stale_after=0.5, poll=0.05):
            taken.set()

    waiter = threading.Thread(target=take)
    waiter.start()
    assert not taken.wait(1.2)
    ended.set()
    assert taken.wait(5)
    holder.join()
    waiter.join()


def test_a_full_disk_takes_no_lock_from_its_holder(tmp_path, monkeypatch) -> None:
    """A beat takes no room, and one that is refused is tried again."""
    written, real = [], Path.open

    def full(self: Path, mode: str = "r", *more, **named):
        if self.name == "beat" and mode != "r":
            written.append(mode)
            if "w" in mode or len(written) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, mode, *more, **named)

    with FolderLock(tmp_path / "lock", "it", stale_after=0.3) as lock:
        monkeypatch.setattr(Path, "open", full)
        while (tmp_path / "lock/beat").read_text() in ("0", "1"):
            assert set(written) <= {"r+"}
            time.sleep(0.02)
        assert lock.held


def _hold(path: Path) -> None:
    with FolderLock(path, "it"):
        (path.parent / "held").write_text("")
        time.sleep(60)


def test_the_lock_of_a_killed_process_of_this_host_is_taken_at_once(tmp_path) -> None:
    holder = FORKS.Process(target=_hold, args=(tmp_path / "lock",))
    holder.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.02)
    holder.kill()  # and not joined: a process nobody collected is dead all the same
    begun = time.monotonic()
    with FolderLock(tmp_path / "lock", "it", stale_after=60):
        assert time.monotonic() - begun < 5
    holder.join()


def test_what_killed_processes_left_among_locks_is_cleared_by_the_next_holder(tmp_path) -> None:
    """Nothing that may still be held is touched; old is what the file system's own clock says is old."""
    with FolderLock(tmp_path / "other", "it"):
        mine = json.loads((tmp_path / "other/owner.json").read_text())
    dead = {"host": mine["host"], "pid": os.getpid(), "started": "1"}
    left_by(tmp_path / "published", **dead)  # nobody waits for it
    left_by(tmp_path / ".on its way-1", **dead)
    left_by(tmp_path / ".given back-1-gone", host="far/1/x")
    left_by(tmp_path / "far and silent")
    (tmp_path / ".without an owner-1").mkdir()
    for path in (*(tmp_path / "far and silent").iterdir(), *tmp_path.glob("far and*"), *tmp_path.glob(".w*")):
        os.utime(path, (time.time() - 7200,) * 2)
    left_by(tmp_path / "far")
    left_by(tmp_path / ".on its way-2", host=mine["host"], pid=os.getpid(), started=mine["started"])
    (tmp_path / ".without an owner-2").mkdir()
    with FolderLock(tmp_path / "lock", "it") as lock:
        lock.clear_around()
        assert {path.name for path in tmp_path.iterdir()} == {
            "lock", "far", ".on its way-2", ".without an owner-2"}  # fmt: skip


def test_a_number_used_again_by_another_process_does_not_keep_a_lock(tmp_path) -> None:
    with FolderLock(tmp_path / "other", "it"):
        mine = json.loads((tmp_path / "other/owner.json").read_text())
    left_by(tmp_path / "lock", host=mine["host"], pid=os.getpid(), started="1")
    with FolderLock(tmp_path / "lock", "it", stale_after=60):
        pass


def test_of_two_waiters_that_find_it_abandoned_one_takes_it(tmp_path) -> None:
    left_by(tmp_path / "lock")
    inside, most = [], []

    def work() -> None:
        with FolderLock(tmp_path / "lock", "it", stale_after=0.4, poll=0.01):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.2)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert most == [1] * 4
