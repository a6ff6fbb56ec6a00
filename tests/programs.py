"""Programs in processes of their own, without the seconds that their imports take.

One process imports what a run needs, for all of the tests' processes. Each program runs in a fork of it, with
its own folder, environment, output and exit code. The server that a program's workers are forked from is a
second fork of it, a twin that waits until `multiprocessing` would start one, and that knows nothing of what the
program has done since.
"""

import atexit
import fcntl
import functools
import json
import multiprocessing.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_SERVER = """
import atexit, gc, json, multiprocessing.util, os, pathlib, runpy, select, signal, socket, sys
import unittest.mock
sys.path.insert(0, "")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
import hydra.main, lightning, open_clip, transformers
import mergekit_lab.command_line, mergekit_lab.programs, mergekit_lab.runs.graph, mergekit_lab.runs.report
import mergekit_lab.commands.merge_checkpoints, mergekit_lab.runs.train
listener, folder, own = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], pathlib.Path(sys.argv[3])
sys.path.insert(0, folder)
import backbone, composing, pictures
sys.path.pop(0)
pictures.leave_undrawn().start()
small = backbone.make_small(backbone.write_small(own))
unittest.mock.patch("mergekit_lab.store.store.sync_to_disk").start()
composing.compose_config([])
composing.HydraConfig.instance().cfg = None
composing.GlobalHydra.instance().clear()
composing.ConfigRepository.load_config = composing.load_once
spawn = multiprocessing.util.spawnv_passfds
def move(request):
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
def be_fork_server(rest, passed):
    numbers = ", ".join(map(str, passed))
    exec(f"from multiprocessing.forkserver import main; main({numbers}, {rest}")
def make_twin():
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        command, passed, *_ = socket.recv_fds(theirs, 65536, 2)
        if command:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            theirs.close()
            be_fork_server(command.decode(), passed)
        os._exit(0)
    theirs.close()
    def start(path, arguments, passed):
        begun, _, rest = arguments[-1].partition(", ".join(map(str, passed)) + ", ")
        if not begun.endswith("forkserver import main; main("):
            return spawn(path, arguments, passed)
        multiprocessing.util.spawnv_passfds = spawn
        socket.send_fds(ours, [rest.encode()], passed)
        ours.close()
        return pid
    multiprocessing.util.spawnv_passfds = start
def run_program(request):
    for number, path in enumerate((os.devnull, request["out"], request["err"])):
        if path == "closed pipe":
            reader, opened = os.pipe()
            os.close(reader)
        else:
            opened = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    move(request)
    if request["whole"]:
        small.close()
    make_twin()
    sys.argv = ["mergekit_lab", *request["arguments"]]
    code = 0
    try:
        if request["code"]:
            exec(request["code"], {"__name__": "__main__"})
        else:
            runpy.run_module("mergekit_lab", run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        if exit.code is not None and not isinstance(exit.code, int):
            raise
        code = exit.code or 0
    if not request["quick"]:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
gc.collect()
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
asker = None
while asker is None:
    ready, _, _ = select.select([0, listener], [], [])
    if 0 in ready:
        os._exit(0)
    asker, _ = listener.accept()
    if os.fork():
        asker.close()
        asker = None
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
listener.close()
passed = socket.recv_fds(asker, 1, 2)[1]
lines = asker.makefile()
if passed:
    request = json.loads(lines.readline())
    move(request)
    be_fork_server(request["rest"], passed)
    os._exit(0)
for line in lines:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        os.close(asker.detach())
        run_program(request)
        break
    asker.sendall(f"{child}\\n".encode())
    asker.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n".encode())
else:
    os._exit(0)
"""
"""Where the console works, a fork ends without taking its modules down, which costs two seconds."""


def find_socket() -> Path:
    """Where the server of these tests is reached."""
    name = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    return Path(tempfile.gettempdir(), f"programs-{name}", "socket")


def _connect() -> socket.socket:
    """A channel to the server, which the first of the tests' processes starts for all."""
    folder = find_socket().parent
    folder.mkdir(exist_ok=True)
    channel, address = socket.socket(socket.AF_UNIX), str(find_socket())
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            channel.connect(address)
        except OSError:
            Path(address).unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(16)
                number = listener.fileno()
                command = [sys.executable, "-c", _SERVER, str(number), str(Path(__file__).parent), str(folder)]
                server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number])
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            atexit.register(server.communicate)  # it ends with this process, what it forked does not
            channel.connect(address)
    return channel


def share_imports() -> None:
    """Have `multiprocessing` fork workers from the server's imports, in place of importing all once more."""
    spawn = multiprocessing.util.spawnv_passfds

    def start(path: Any, arguments: Any, passed: Any) -> int:
        begun, _, rest = arguments[-1].partition(", ".join(map(str, passed)) + ", ")
        if not begun.endswith("forkserver import main; main("):
            return spawn(path, arguments, passed)
        request = {"rest": rest, "folder": os.getcwd(), "environment": dict(os.environ)}
        with _connect() as channel:
            socket.send_fds(channel, [b" ", json.dumps(request).encode(), b"\n"], passed)
            lives = [(os.POSIX_SPAWN_DUP2, channel.fileno(), 0)]
            return os.posix_spawnp("cat", ["cat"], os.environ, file_actions=lives)  # a child that ends with it

    multiprocessing.util.spawnv_passfds = start


@functools.cache
def _get_server() -> tuple[socket.socket, IO[str]]:
    channel = _connect()
    atexit.register(channel.close)
    channel.sendall(b" ")  # and no numbers of files with it
    return channel, channel.makefile()


def _ask(request: dict[str, Any]) -> None:
    _get_server()[0].sendall(json.dumps(request).encode() + b"\n")


def _answer() -> int:
    return int(_get_server()[1].readline())


@dataclass
class Program:
    """One that runs. Wait for it before the next is started."""

    pid: int
    out: IO[bytes]
    err: IO[bytes]

    def wait(self) -> subprocess.CompletedProcess[str]:
        code = _answer()
        with self.out, self.err:
            return subprocess.CompletedProcess([], code, _read_text(self.out), _read_text(self.err))

    def wait_for(self, line: str) -> None:
        """Until it has written this line."""
        while line not in _read_text(self.out).splitlines():
            os.kill(self.pid, 0)
            time.sleep(0.01)


def _read_text(file: IO[bytes]) -> str:
    return Path(file.name).read_text(errors="backslashreplace")


def start_program(
    folder: Path,
    *arguments: str,
    code: str | None = None,
    stdout: str | None = None,
    environment: dict[str, str] | None = None,
    whole: bool = False,
) -> Program:
    """`python -m mergekit_lab ARGUMENTS` in a folder, or these lines of Python.

    Args:
        stdout: a device to write to, or `closed pipe`.
        environment: all of it; by default this process's, and the store is `store` in the folder.
        whole: with the model that ships, in place of `backbone`'s.
    """
    out, err = (tempfile.NamedTemporaryFile() for _ in range(2))  # noqa: SIM115
    _ask(
        {
            "arguments": arguments,
            "code": code,
            "folder": str(folder),
            "environment": environment or os.environ | {"MERGEKIT_LAB_STORE": str(folder / "store")},
            "out": stdout or out.name,
            "err": err.name,
            "quick": stdout is None and code is None,
            "whole": whole,
        }
    )
    return Program(_answer(), out, err)


def run_program(
    folder: Path, *arguments: str, whole: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """As `start_program`, until its end, with these variables besides."""
    store = {"MERGEKIT_LAB_STORE": str(folder / "store")}
    return start_program(folder, *arguments, environment=os.environ | store | environment, whole=whole).wait()
