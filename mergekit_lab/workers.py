"""Processes that work on this machine's devices: many jobs over a pool, or one job together.

A process a device, because of the interpreter's lock and because a CUDA context belongs to a process. A worker
sees only its device (`CUDA_VISIBLE_DEVICES`), runs many jobs, and ends with its parent. On Linux workers are
forked from one process, a server that `multiprocessing` keeps for this, because importing Lightning and its kin
takes seconds, and several processes at once take longer for it.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
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

_FORKED = sys.platform == "linux"  # elsewhere libraries that a process has loaded do not stand a fork
_PROCESSES: Any = multiprocessing.get_context("forkserver" if _FORKED else "spawn")
_PATIENCE = 8.0
"""Seconds that a worker which is told to stop has for its checkpoint."""


@dataclass(frozen=True)
class Outcome:
    """What became of one job.

    Attributes:
        value: what its function returned.
        error: None, or what went wrong, to be shown.
        mistake: the error is a user's mistake (`InputError`).
        seconds: the job's time, or until it failed.
        device: where it ran last.
    """

    value: Any
    error: str | None
    mistake: bool
    seconds: float
    device: str


class Pool:
    """One worker a device; each takes the next job when it is free.

    A job that raises becomes a failed outcome, and the others run. A worker that dies (killed, out of memory, a
    crash in a library) is replaced, and its job is tried once more.

    Args:
        devices: as torch names them; one may be named more than once ("cpu", "cpu").
    """

    def __init__(self, devices: Sequence[str]) -> None:
        if not devices:
            raise InputError("a pool needs at least one device")
        self.devices = list(devices)
        self._workers: list[_Worker | None] = [None] * len(devices)
        atexit.register(self.close)  # before Python waits for processes that wait for it

    def map(
        self,
        function: Callable[..., Any],
        jobs: Sequence[tuple[Any, ...]],
        done: Callable[[int, Outcome], None] = lambda number, outcome: None,
    ) -> list[Outcome]:
        """The outcomes of `function(*job)`, in the order of the jobs.

        Args:
            function: importable by its name, as workers are fresh processes.
            jobs: arguments, which must pickle; started in this order, and asked for when it is their turn.
            done: called here with a job's number as soon as it is over.
        """
        outcomes: list[Outcome | None] = [None] * len(jobs)
        waiting, tries = deque(range(len(jobs))), [0] * len(jobs)
        while any(outcome is None for outcome in outcomes):
            for position in range(len(self.devices)):
                worker = self._take_worker(position) if waiting else None
                if worker is not None and worker.job is None:
                    number = waiting.popleft()
                    tries[number] += 1
                    worker.start(number, function, jobs[number])
            for position, number, outcome in self._collect_finished():
                if outcome is None:
                    exitcode = self._bury(position)
                    if tries[number] < 2:
                        waiting.appendleft(number)
                        continue
                    outcome = Outcome(None, f"its worker died twice ({exitcode})", False, 0.0,
                                      self.devices[position])  # fmt: skip
                outcomes[number] = outcome
                done(number, outcome)
        return [outcome for outcome in outcomes if outcome is not None]

    def _take_worker(self, position: int) -> _Worker:
        worker = self._workers[position]
        if worker is None or (worker.job is None and not worker.process.is_alive()):
            worker = self._workers[position] = _Worker(self.devices[position], len(self.devices))
        return worker

    def _collect_finished(self) -> Iterator[tuple[int, int, Outcome | None]]:
        """Jobs that are over: (position of the device, job's number, outcome); None where the worker died."""
        busy = {w.channel: (n, w) for n, w in enumerate(self._workers) if w is not None and w.job is not None}
        for channel in wait(list(busy)):
            position, worker = busy[channel]  # type: ignore[index]
            number = worker.job
            assert number is not None
            try:
                value, error, mistake, seconds = worker.channel.recv()
            except (EOFError, OSError):
                yield position, number, None
                continue
            worker.job = None
            yield position, number, Outcome(value, error, mistake, seconds, worker.device)

    def _bury(self, position: int) -> str:
        worker, self._workers[position] = self._workers[position], None
        assert worker is not None
        worker.process.join()
        return _describe_exit(worker.process.exitcode)

    def dismiss(self) -> None:
        """Let idle workers end; none is waited for."""
        for worker in self._workers:
            if worker is not None and worker.job is None:
                worker.channel.close()

    def close(self) -> None:
        """End all workers. Their jobs are asked to stop, and killed after 8 s."""
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            worker.channel.close()
        stop([worker.process for worker in workers])
        self._workers = [None] * len(self.devices)
        atexit.unregister(self.close)


class _Worker:
    def __init__(self, device: str, sharers: int) -> None:
        self.device = device
        self.channel, self.process = _start(_limit_devices([device]), sharers)
        self.job: int | None = None

    def start(self, number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.job = number
        self.channel.send((function, arguments))


def raise_on_sigterm() -> None:
    """Make SIGTERM end this process as Ctrl-C does, so that locks are released."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def leave(code: int) -> NoReturn:
    """End this process at once, after what asked to be done at its end.

    Python would first take apart all that torch and its like have made: over a second, and many on a busy
    machine, of the ten that a run has which is told to stop.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.disable(logging.INFO)  # what libraries count, they tell at the end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may read it any more
            stream.flush()
    os._exit(code)


def import_ahead(modules: Sequence[str]) -> None:
    """Import in the background what workers will need, once for all of them.

    Workers are forked from a process that has imported these modules, has no threads at work and has never
    touched a GPU. To be called before the first worker is started; without it, each imports for itself.
    """
    if _FORKED:
        multiprocessing.set_forkserver_preload(list(modules))
        multiprocessing.resource_tracker.ensure_running()  # which lets signals through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C is this process's to answer
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(environment: Mapping[str, str], sharers: int) -> tuple[Connection, Any]:
    """A process that does what is sent through the channel, which knows this environment beside ours."""
    ours, theirs = _PROCESSES.Pipe()
    surroundings = ({**os.environ, **environment}, tempfile.gettempdir(), _count_threads(sharers))
    process = _PROCESSES.Process(target=_serve, args=(theirs, *surroundings))
    process.start()
    theirs.close()
    return ours, process


def _serve(
    channel: Connection, environment: Mapping[str, str], temporary: str, threads: int | None
) -> NoReturn:
    """Do what the channel asks for, until it is closed."""
    os.environ.clear()  # a fork has the environment of the process that it was forked from
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
            function, arguments = channel.recv()
        except EOFError:
            return 0
        begun = time.monotonic()
        value, error, mistake = None, None, False
        try:
            value = function(*arguments)
        except InputError as problem:
            error, mistake = str(problem), True
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
            traceback.print_exc()
        channel.send((value, error, mistake, time.monotonic() - begun))


def run_together(function: Callable[..., Any], arguments: tuple[Any, ...], devices: Sequence[str]) -> Any:
    """What rank 0 returns of `function(*arguments)`, run by one process a device that can talk to each other.

    Processes find `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK` and `LOCAL_RANK` set. If one fails, the
    others are ended: they would wait for it for ever.

    Raises:
        InputError: a rank's user mistake.
        RuntimeError: another failure of a rank, or its death.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(devices))}
    channels, processes = [], []
    try:
        for rank in range(len(devices)):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
            channel, process = _start(shared | _limit_devices(devices) | mine, len(devices))
            channels.append(channel)
            processes.append(process)
            channel.send((function, arguments))
        first = _collect(channels, processes)[0]
        for channel in channels:
            channel.close()
        for process in processes:
            process.join(_PATIENCE)  # it ends by itself, for its channel is closed
        return first
    finally:
        for channel in channels:
            channel.close()
        stop(processes)


def _collect(channels: list[Connection], processes: list[Any]) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(channels):
        for channel in wait([c for rank, c in enumerate(channels) if rank not in values]):
            rank = channels.index(channel)  # type: ignore[arg-type]
            try:
                value, error, mistake, _ = channels[rank].recv()
            except (EOFError, OSError):
                processes[rank].join()
                ending = _describe_exit(processes[rank].exitcode)
                raise RuntimeError(f"process {rank} of {len(channels)} died ({ending})") from None
            if error is not None:
                raise InputError(error) if mistake else RuntimeError(f"process {rank}: {error}")
            values[rank] = value
    return [values[rank] for rank in range(len(channels))]


def stop(processes: Sequence[Any]) -> None:
    """End processes by SIGTERM, all at once, and by SIGKILL those that have not ended within their 8 s."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _PATIENCE
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _end_with_parent() -> None:
    """A worker whose parent was killed has nobody to work for; what it was making can be resumed."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _limit_devices(devices: Sequence[str]) -> dict[str, str]:
    """The environment in which these are the only CUDA devices, in this order."""
    indices = [int(d.partition(":")[2] or 0) for d in devices if d.startswith("cuda")]
    if not indices:
        return {}
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = mine.split(",") if mine else [str(n) for n in range(max(indices) + 1)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[i] for i in indices)}


def _count_threads(sharers: int) -> int | None:
    """Cores divided among processes, unless the user has said how many threads there are."""
    if sharers < 2 or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, count_cores() // sharers)
