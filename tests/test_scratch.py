"""What processes put into the temporary folder goes with them, or with the next one."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mergekit_lab.owners import identify_process

WORK = """
import multiprocessing.util, os, signal, tempfile
from mergekit_lab.scratch import gather_temporary_files
gather_temporary_files()
tempfile.mkdtemp("wandb-media")
multiprocessing.util.get_temp_dir()
print(tempfile.gettempdir(), flush=True)
if {kill}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:  # a short path, as sockets need
        yield Path(name)


def work(folder: Path, kill: bool = False) -> str:
    done = subprocess.run([sys.executable, "-c", WORK.format(kill=kill)], capture_output=True, text=True,
                          env=os.environ | {"TMPDIR": str(folder)})  # fmt: skip
    assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
    return done.stdout.strip()


def test_a_process_takes_its_temporary_files_with_it(folder) -> None:
    assert Path(work(folder)).is_relative_to(folder / f"mergekit_lab-{os.getuid()}")
    assert [path for path in folder.rglob("*") if path.name != f"mergekit_lab-{os.getuid()}"] == []


def test_those_of_a_killed_one_go_with_the_next(folder) -> None:
    left = Path(work(folder, kill=True))
    assert any(left.glob("*wandb-media"))
    assert any(left.glob("pymp-*"))
    work(folder)
    assert not left.exists()


def test_those_of_another_process_stay(folder) -> None:
    above = folder / f"mergekit_lab-{os.getuid()}"
    for name in ("alive", "far", "begun"):
        (above / name).mkdir(parents=True)
    (above / "alive/owner.json").write_text(json.dumps(identify_process()))
    (above / "far/owner.json").write_text(json.dumps(identify_process() | {"host": "far"}))
    work(folder)
    assert {path.name for path in above.iterdir()} == {"alive", "far", "begun"}
    os.utime(above / "begun", (time.time() - 7200,) * 2)
    work(folder)
    assert {path.name for path in above.iterdir()} == {"alive", "far"}


def test_a_folder_that_is_not_ours_is_not_used(folder) -> None:
    (folder / "elsewhere").mkdir()
    (folder / f"mergekit_lab-{os.getuid()}").symlink_to(folder / "elsewhere")
    assert work(folder) == str(folder)
    assert list((folder / "elsewhere").iterdir()) == []
