"""One holder at a time; a lock whose holder is gone is taken over, whatever the clocks say."""

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from mergekit_lab import InputError
from mergekit_lab.owners import identify_process
from mergekit_lab.store.lock import FolderLock, is_held

FORKS = multiprocessing.get_context("forkserver")
ELSEWHERE = {"host": "far", "boot": "x", "namespace": 1, "pid": 1, "started": "5"}


def leave(path: Path, **owner) -> Path:
    """A lock as a process of another host leaves it; its mark."""
    path.mkdir()
    (path / "old").write_text(json.dumps(ELSEWHERE | owner))
    return path / "old"


def take_in_turn(path: Path, threads: int, seconds: float) -> list[int]:
    """How many held the lock, whenever another one came to hold it."""
    inside, most = [], []

    def work() -> None:
        with FolderLock(path, "it", stale_after=0.4):
            inside.append(1)
            most.append(len(inside))
            time.sleep(seconds)
            inside.pop()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return most


def take(path: Path, stale_after: float = 60.0) -> threading.Event:
    """Set when another thread has held the lock."""
    taken = threading.Event()

    def work() -> None:
        with FolderLock(path, "it", stale_after=stale_after):
            taken.set()

    threading.Thread(target=work, daemon=True).start()
    return taken


def test_threads_hold_it_in_turn(tmp_path) -> None:
    assert take_in_turn(tmp_path / "lock", 6, 0.02) == [1] * 6
    assert list(tmp_path.iterdir()) == []


def test_of_waiters_that_find_it_abandoned_one_takes_it(tmp_path) -> None:
    leave(tmp_path / "lock")
    assert take_in_turn(tmp_path / "lock", 4, 0.2) == [1] * 4
    assert list(tmp_path.iterdir()) == []


def test_another_host_s_lock_without_a_sign_is_taken_over_after_its_time(tmp_path) -> None:
    mark = leave(tmp_path / "lock")
    begun = time.monotonic()
    with FolderLock(tmp_path / "lock", "it", stale_after=0.6) as lock:
        assert time.monotonic() - begun >= 0.6
        assert lock.held
        assert not mark.exists()


@pytest.mark.parametrize("text", ["", '{"host": "far', "[]", "{}", "[" * 3000, '{"pid": ' + "9" * 5000 + "}"])
def test_a_lock_that_says_of_no_owner_is_taken_over_after_its_time(tmp_path, text) -> None:
    """A machine that lost its power leaves files that are empty or cut."""
    leave(tmp_path / "lock").write_text(text)
    taken = take(tmp_path / "lock", 0.6)
    assert not taken.wait(0.4)
    assert taken.wait(5)


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)], ids=["pipe", "folder", "link to itself"]
)
def test_an_owner_that_is_no_file_is_waited_for_no_longer_than_another(tmp_path, make) -> None:
    mark = leave(tmp_path / "lock")
    mark.unlink()
    make(mark)
    assert take(tmp_path / "lock", 0.3).wait(5)


@pytest.mark.parametrize(
    "make",
    [
        Path.touch,
        os.mkfifo,
        lambda path: path.symlink_to("/nowhere"),
        lambda path: path.symlink_to("/dev/null"),
    ],
    ids=["file", "pipe", "link to nowhere", "device"],
)
def test_what_is_no_folder_in_a_lock_s_place_is_named(tmp_path, make) -> None:
    make(tmp_path / "lock")
    with pytest.raises(InputError, match=r"not a folder: delete it"):
        FolderLock(tmp_path / "lock", "it").__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("pid", [2**70, -1, 0, True, "1", None])
def test_numbers_of_no_process_are_waited_for_as_other_hosts_are(tmp_path, pid) -> None:
    leave(tmp_path / "lock", **identify_process() | {"pid": pid})
    taken = take(tmp_path / "lock", 0.6)
    assert not taken.wait(0.3)
    assert taken.wait(5)


@pytest.mark.parametrize("skew", [-1e6, 1e6], ids=["clock behind", "clock ahead"])
def test_a_live_lock_is_waited_for_though_the_clocks_of_the_hosts_differ(tmp_path, skew) -> None:
    mark = leave(tmp_path / "lock")
    ended = threading.Event()

    def renew_until_ended() -> None:
        while not ended.wait(0.1):
            os.utime(mark, (time.time() + skew, time.time() + skew))

    holder = threading.Thread(target=renew_until_ended)
    holder.start()
    taken = take(tmp_path / "lock", 0.5)
    assert not taken.wait(1.2)
    ended.set()
    assert taken.wait(5)
    holder.join()


def test_a_sign_of_life_that_is_refused_is_given_again(tmp_path, monkeypatch) -> None:
    refused, real = [], os.utime

    def refuse_once(*arguments, **named):
        if not refused:
            refused.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **named)

    with FolderLock(tmp_path / "lock", "it", stale_after=0.3) as lock:
        monkeypatch.setattr(os, "utime", refuse_once)
        (mark,) = (tmp_path / "lock").iterdir()
        before = mark.stat().st_mtime_ns
        while mark.stat().st_mtime_ns == before:
            time.sleep(0.02)
        assert refused
        assert lock.held


def _hold(path: Path, stale_after: float, seconds: float) -> None:
    with FolderLock(path, "it", stale_after=stale_after) as lock:
        (path.parent / "begun").write_text("")
        time.sleep(seconds)
        (path.parent / "ended").write_text(str(lock.held))


def start_holder(path: Path, stale_after: float = 60.0, seconds: float = 60.0):
    holder = FORKS.Process(target=_hold, args=(path, stale_after, seconds))
    holder.start()
    while not (path.parent / "begun").exists():
        time.sleep(0.02)
    return holder


def test_the_lock_of_a_killed_process_of_this_host_is_taken_at_once(tmp_path) -> None:
    holder = start_holder(tmp_path / "lock")
    assert is_held(tmp_path / "lock")
    holder.kill()  # and not joined: a process nobody collected is dead all the same
    assert take(tmp_path / "lock").wait(5)
    holder.join()


def test_a_process_that_was_stopped_and_goes_on_knows_that_its_lock_is_another_s(tmp_path) -> None:
    holder = start_holder(tmp_path / "lock", 0.5, 0.3)
    os.kill(holder.pid, signal.SIGSTOP)
    with FolderLock(tmp_path / "lock", "it", stale_after=0.5) as lock:
        os.kill(holder.pid, signal.SIGCONT)
        holder.join()
        assert (tmp_path / "ended").read_text() == "False"
        assert lock.held


def test_a_number_used_again_by_another_process_does_not_keep_a_lock(tmp_path) -> None:
    leave(tmp_path / "lock", **identify_process() | {"started": "1"})
    assert not is_held(tmp_path / "lock")
    assert take(tmp_path / "lock").wait(5)


@pytest.mark.parametrize("other", [{"host": "far"}, {"boot": "x"}, {"namespace": 1}])
def test_a_number_that_another_host_boot_or_container_gave_says_nothing_here(tmp_path, other) -> None:
    leave(tmp_path / "lock", **identify_process() | {"started": "1"} | other)
    assert not take(tmp_path / "lock").wait(0.3)
    (tmp_path / "lock/old").unlink()


def test_what_killed_processes_left_among_locks_is_cleared_by_the_next_holder(tmp_path) -> None:
    """Nothing that may still be held is touched; old is what the file system's own clock says is old."""
    dead = identify_process() | {"started": "1"}
    leave(tmp_path / "published", **dead)  # nobody waits for it
    (tmp_path / "given back").mkdir()
    leave(tmp_path / ".on its way-1", **dead)
    silent = leave(tmp_path / "far and silent")
    (tmp_path / ".without an owner-1").mkdir()
    for path in (silent, silent.parent, tmp_path / ".without an owner-1"):
        os.utime(path, (time.time() - 7200,) * 2)
    leave(tmp_path / "far")
    leave(tmp_path / ".on its way-2", **identify_process())
    (tmp_path / ".without an owner-2").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with FolderLock(tmp_path / "lock", "it") as lock:
        lock.clear_around()
        assert {path.name for path in tmp_path.iterdir()} == {
            "lock", "far", ".on its way-2", ".without an owner-2", "pipe"}  # fmt: skip
