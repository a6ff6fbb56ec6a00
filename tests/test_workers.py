"""A job that fails or dies stops no other; processes that work together end together."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import rank, work
from programs import start_program

from hydra_plugins.mergekit_lab import local_launcher
from mergekit_lab import InputError
from mergekit_lab.machine import count_cores
from mergekit_lab.workers import Pool, run_together, stop


def test_jobs_that_fail_or_die_are_reported_and_the_others_go_on(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    pool = Pool(["cuda:1", "cuda:0"])
    kinds = ["fine", "wrong", "dies once", "broken", "dies", "fine too"]
    try:
        results = dict(pool.run(work, [(job_kind, str(tmp_path)) for job_kind in kinds]))
        again = dict(pool.run(work, [("fine", str(tmp_path))]))
    finally:
        pool.close()
    fine, wrong, once, broken, dies, too = (results[number] for number in range(6))
    for outcome, job_kind in ((fine, "fine"), (once, "dies once"), (too, "fine too"), (again[0], "fine")):
        assert outcome.error is None
        name, card, threads = outcome.value.rsplit(" ", 2)
        assert (name, card) == (job_kind, {"cuda:0": "4", "cuda:1": "7"}[outcome.device])
        assert int(threads) == max(1, count_cores() // 2)
    assert (wrong.error, wrong.mistake) == ("rho must be positive", True)
    assert (broken.error, broken.mistake) == ("ValueError: a bug", False)
    assert dies.error == "its worker died twice (killed by SIGKILL)"
    assert (tmp_path / "dies once").read_text() == (tmp_path / "dies").read_text() == "xx"


def test_processes_that_work_together_know_their_rank_and_end_when_one_fails() -> None:
    assert run_together(rank, (None,), ["cpu", "cpu"]) == ("0", "0", "2", "127.0.0.1")
    begun = time.monotonic()
    with pytest.raises(InputError, match="this rank has a mistake"):
        run_together(rank, (1,), ["cpu", "cpu"])
    assert time.monotonic() - begun < 30


def test_what_workers_are_forked_from_has_touched_no_gpu(tmp_path) -> None:
    """CUDA does not work in a fork of a process that has as much as counted its devices."""
    lines = f"import os, torch, open_clip, {', '.join(local_launcher.MODULES)}\n"
    lines += "if os.fork() == 0: os._exit(torch.cuda._is_in_bad_fork())\n"
    lines += "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))"
    assert start_program(tmp_path, code=lines).wait().returncode == 0


class Told:
    """A process that ends when it is waited for, if it was told to."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.told = log, False

    def is_alive(self) -> bool:
        return "waited" not in self.log or not self.told

    def terminate(self) -> None:
        self.told = True
        self.log.append("told")

    def join(self, seconds: float | None = None) -> None:
        self.log.append("waited")

    def kill(self) -> None:
        self.log.append("killed")


def test_processes_are_all_told_to_stop_before_one_is_waited_for() -> None:
    log: list[str] = []
    stop([Told(log) for _ in range(3)])
    assert log == ["told"] * 3 + ["waited"] * 3


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(done: Callable[[], bool]) -> None:
    for _ in range(600):
        if done():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come about within a minute")


def test_workers_end_when_their_parent_is_killed(tmp_path) -> None:
    file = tmp_path / "worker"
    lines = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    lines += f"import jobs; jobs.start_worker({str(tmp_path)!r})"
    parent = start_program(tmp_path, code=lines)
    try:
        wait_until(lambda: file.exists() and file.read_text() != "")
        assert is_alive(int(file.read_text()))
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not is_alive(int(file.read_text())))
