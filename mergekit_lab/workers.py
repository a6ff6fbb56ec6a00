"""Processes that work on this machine's devices: many jobs over a pool, or one job together.

Every device has its own process, because of the interpreter's lock and because a CUDA context belongs to a
process. A worker sees only its device (`CUDA_VISIBLE_DEVICES`), runs many jobs, and ends with its parent. On
Linux, workers are forked from `multiprocessing`'s fork server, which has imported Lightning and the like once:
that takes seconds, and longer if several processes do it at the same time.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from mergekit_lab.console import outlive_console
from mergekit_lab.errors import InputError
from mergekit_lab.machine import count_cores

_FORKED = sys.platform == "linux"  # elsewhere, loaded libraries do not survive a fork
_PROCESSES: Any = multiprocessing.get_context("forkserver" if _FORKED else "spawn")
_PATIENCE = 8.0
"""Seconds that a worker has to write its checkpoint when it is told to stop."""


@dataclass(frozen=True)
class Outcome:
    """What became of one job.

    Attributes:
        value: what its function returned.
        error: None, or what went wrong, to be shown.
        mistake: the error is a user's mistake (`InputError`).
        seconds: how long it ran.
        device: where it ran last.
    """

    value: Any
    error: str | None
    mistake: bool
    seconds: float
    device: str


class Pool:
    """One worker for each device. A free worker takes the next job.

    If a job raises, its outcome has the error, and the other jobs still run. A worker that dies (killed, out of
    memory, a crash in a library) is replaced, and its job is tried once more.

    Args:
        devices: as torch names them; one may be named more than once ("cpu", "cpu").
    """

    def __init__(self, devices: Sequence[str]) -> None:
        if not devices:
            raise InputError("a pool needs at least one device")
        self.devices = list(devices)
        self._workers: list[_Worker | None] = [None] * len(devices)
        atexit.register(self.close)  # else Python would wait at exit for workers that wait for jobs

    def run(
        self, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, Outcome]]:
        """The number of each job and the outcome of `function(*job)`, as jobs finish.

        Args:
            function: importable by its name, because workers are other processes.
            jobs: arguments, which must pickle. Jobs start in this order.
        """
        waiting, tries, left = deque(range(len(jobs))), [0] * len(jobs), len(jobs)
        while left:
            for position in range(len(self.devices)):
                worker = self._take_worker(position) if waiting else None
                if worker is not None and worker.job is None:
                    worker.job = waiting.popleft()
                    tries[worker.job] += 1
                    worker.channel.send((function, jobs[worker.job]))
            for worker in _wait_for([each for each in self._workers if each and each.job is not None]):
                outcome, number, worker.job = worker.receive(), worker.job, None
                if isinstance(outcome, str):
                    self._workers[self._workers.index(worker)] = None
                    if tries[number] < 2:
                        waiting.appendleft(number)
                        continue
                    outcome = Outcome(None, f"its worker died twice ({outcome})", False, 0.0, worker.device)
                left -= 1
                yield number, outcome

    def _take_worker(self, position: int) -> _Worker:
        worker = self._workers[position]
        if worker is None or (worker.job is None and not worker.process.is_alive()):
            device = self.devices[position]
            worker = self._workers[position] = _Worker(device, _limit_devices([device]), len(self.devices))
        return worker

    def dismiss(self) -> None:
        """Let idle workers end, without waiting for them."""
        for worker in self._workers:
            if worker is not None and worker.job is None:
                worker.channel.close()

    def close(self) -> None:
        """End all workers. Running jobs get SIGTERM, and SIGKILL after 8 s."""
        _end([worker for worker in self._workers if worker is not None])
        self._workers = [None] * len(self.devices)
        atexit.unregister(self.close)


class _Worker:
    """A process that runs the functions sent through its channel, in this process's environment with additions.

    Attributes:
        job: the number of the job that it works on; None if it is idle.
    """

    def __init__(self, device: str, environment: Mapping[str, str], sharers: int) -> None:
        self.device = device
        self.job: Any = None
        self.channel, theirs = _PROCESSES.Pipe()
        surroundings = ({**os.environ, **environment}, tempfile.gettempdir(), _count_threads(sharers))
        self.process = _PROCESSES.Process(target=_serve, args=(theirs, *surroundings))
        self.process.start()
        theirs.close()

    def receive(self) -> Outcome | str:
        """The outcome of the job; if the process died, how it died."""
        try:
            answer: tuple[Any, str | None, bool, float] = self.channel.recv()
            return Outcome(*answer, self.device)
        except (EOFError, OSError):
            self.process.join()
        code = self.process.exitcode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _wait_for(workers: Sequence[_Worker]) -> list[_Worker]:
    """Wait until some of these busy workers have an answer, or died; return those."""
    ready = wait([worker.channel for worker in workers])
    return [worker for worker in workers if worker.channel in ready]


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.channel.close()
    stop([worker.process for worker in workers])


def raise_on_sigterm() -> None:
    """Treat SIGTERM as Ctrl-C, so that locks are released."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def leave(code: int) -> NoReturn:
    """Run the exit handlers, then end this process at once.

    A normal exit would first destroy every object of torch and other libraries. That takes over a second, and
    on a busy machine much of the ten seconds in which a run that is told to stop must end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.disable(logging.INFO)  # some libraries log statistics in their exit handlers
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader may be gone
            stream.flush()
    os._exit(code)


def import_ahead(modules: Sequence[str]) -> None:
    """Let the fork server import what workers need, in the background and once for all of them.

    The server runs no threads and never touches a GPU. Call this before the first worker starts. Without it,
    every worker imports for itself.
    """
    if _FORKED:
        multiprocessing.set_forkserver_preload(list(modules))
        multiprocessing.resource_tracker.ensure_running()  # first, because it unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # only this process answers Ctrl-C
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(
    channel: Connection, environment: Mapping[str, str], temporary: str, threads: int | None
) -> NoReturn:
    """Run what arrives through the channel, until it is closed."""
    os.environ.clear()  # the fork has the fork server's environment
    os.environ.update(environment)
    tempfile.tempdir = temporary
    outlive_console()
    _end_with_parent()
    raise_on_sigterm()
    if _FORKED:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        leave(_answer(channel))
    except KeyboardInterrupt:
        leave(130)


def _answer(channel: Connection) -> int:
    while True:
        try:
            message = channel.recv_bytes()
        except EOFError:
            return 0
        begun = time.monotonic()
        value, error, mistake = None, None, False
        try:
            function, arguments = pickle.loads(message)
            value = function(*arguments)
        except InputError as problem:
            error, mistake = str(problem), True
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
            traceback.print_exc()
        channel.send((value, error, mistake, time.monotonic() - begun))


def run_together(function: Callable[..., Any], arguments: tuple[Any, ...], devices: Sequence[str]) -> Any:
    """Run `function(*arguments)` in one process for each device, as ranks of one group; return rank 0's result.

    `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK` and `LOCAL_RANK` are set for them. If one process fails,
    the others are ended, because they would wait for it forever.

    Raises:
        InputError: a rank's user mistake.
        RuntimeError: another failure of a rank, or its death.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(devices))}
    workers: list[_Worker] = []
    values: dict[int, Any] = {}
    try:
        for rank, device in enumerate(devices):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
            workers.append(_Worker(device, shared | _limit_devices(devices) | mine, len(devices)))
            workers[rank].channel.send((function, arguments))
        while len(values) < len(workers):
            for worker in _wait_for([each for rank, each in enumerate(workers) if rank not in values]):
                rank, outcome = workers.index(worker), worker.receive()
                if isinstance(outcome, str):
                    raise RuntimeError(f"process {rank} of {len(workers)} died ({outcome})")
                if outcome.error is not None:
                    kind, where = (InputError, "") if outcome.mistake else (RuntimeError, f"process {rank}: ")
                    raise kind(where + outcome.error)
                values[rank] = outcome.value
        for worker in workers:
            worker.channel.close()
        for worker in workers:
            worker.process.join(_PATIENCE)  # a closed channel ends it
        return values[0]
    finally:
        _end(workers)


def stop(processes: Sequence[Any]) -> None:
    """Send SIGTERM to all processes, and SIGKILL to those that are still alive after 8 s."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _PATIENCE
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _end_with_parent() -> None:
    """End this worker if its parent is killed. Another run can resume what it was making."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _limit_devices(devices: Sequence[str]) -> dict[str, str]:
    """The environment variable that leaves only these CUDA devices visible, in this order."""
    indices = [int(d.partition(":")[2] or 0) for d in devices if d.startswith("cuda")]
    if not indices:
        return {}
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = mine.split(",") if mine else [str(n) for n in range(max(indices) + 1)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[i] for i in indices)}


def _count_threads(sharers: int) -> int | None:
    """Threads for each of several processes: an equal share of the cores. None leaves torch's own choice."""
    if sharers < 2 or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, count_cores() // sharers)
