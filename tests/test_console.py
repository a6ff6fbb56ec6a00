"""Whatever becomes of the console, the work ends as it would have, and its exit code says so."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from composing import TINY
from programs import start_program
from safetensors.torch import save_file

from mergekit_lab.console import PlainFormatter

SPEAKING = """
import logging, sys
from mergekit_lab.console import outlive_console
outlive_console()
logging.basicConfig(stream=sys.stdout)
for number in range(3000):
    print("line", number, flush=number % 7 == 0)
    logging.warning("line %d", number)
import rich
rich.print("[bold]line")
open("done", "w").close()
"""


def open_closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def open_full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def run(folder: Path, lost: int, *command: str, both: bool = False) -> tuple[int, str]:
    """Exit code and what reached stderr."""
    try:
        ended = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            stdout=lost,
            stderr=lost if both else subprocess.PIPE,
            text=True,
            timeout=300,
            env=os.environ | {"MERGEKIT_LAB_STORE": str(folder / "store"), "OMP_NUM_THREADS": "1"},
        )
    finally:
        os.close(lost)
    return ended.returncode, ended.stderr or ""


@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("lost", [open_closed_pipe, open_full_disk])
def test_print_logging_and_rich_outlive_their_reader_and_say_so_once(tmp_path, lost, flags) -> None:
    code, errors = run(tmp_path, lost(), *flags, "-c", SPEAKING)
    assert code == 0
    assert (tmp_path / "done").exists()
    assert errors.count("the output cannot be written") == len(errors.splitlines()) == 1


@pytest.mark.parametrize("lost", [open_closed_pipe, open_full_disk])
def test_a_process_without_any_console_ends_well(tmp_path, lost) -> None:
    assert run(tmp_path, lost(), "-c", SPEAKING, both=True)[0] == 0
    assert (tmp_path / "done").exists()


def test_no_file_gets_the_number_of_a_console_that_was_closed(tmp_path) -> None:
    opened = "open('f', 'w').fileno() > 2 or 1 / 0"
    code = f"from mergekit_lab.console import outlive_console as o; o(); print(0); {opened}"
    done = subprocess.run(f'"{sys.executable}" -c "{code}" <&- >&- 2>&-', shell=True, cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "f").read_text() == ""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_a_console_cannot_show_is_written_with_escapes(tmp_path, encoding) -> None:
    code = "from mergekit_lab.console import outlive_console as o; o(); print('α', '\\udcff')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True,
                          env=os.environ | {"PYTHONIOENCODING": encoding})  # fmt: skip
    assert done.stdout == {"ascii": b"\\u03b1 \\udcff\n", "utf-8": "α \\udcff\n".encode()}[encoding]


def test_a_merge_is_finished_for_nobody_to_read_of_it(tmp_path) -> None:
    for name in ("base", "a", "b"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.randn(4, 4)}, tmp_path / name / "model.safetensors")
    overrides = ["+experiment=merge_checkpoints", "base=base", "experts=[a,b]", "merger=average", "out=merged"]
    done = start_program(tmp_path, *overrides, "device=cpu", "run_dir=run", stdout="/dev/full").wait()
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), done.stderr
    assert (tmp_path / "merged/model.safetensors").is_file()


@pytest.mark.slow
def test_a_run_s_workers_finish_for_nobody_to_read_of_it(tmp_path) -> None:
    overrides = [each for each in TINY if not each.startswith(("device=", "progress="))]
    overrides += ["device=[cpu,cpu]", "stage=finetune", "joint=false", "run_dir=run"]
    done = start_program(tmp_path, *overrides, stdout="closed pipe").wait()
    assert done.returncode == 0, done.stderr
    assert len(done.stderr) < 2000, done.stderr
    assert len(list((tmp_path / "store/experts").iterdir())) == 2
    assert not (tmp_path / "run/failure.json").exists()


@pytest.mark.parametrize(
    ("level", "text", "shown"),
    [("INFO", "done", "done"), ("WARNING", "odd", "warning: odd"), ("WARNING", "warning: odd", "warning: odd")],
)
def test_a_warning_begins_with_the_word_on_the_terminal(level: str, text: str, shown: str) -> None:
    record = logging.LogRecord("name", logging.getLevelNamesMapping()[level], "file", 1, text, (), None)
    assert PlainFormatter("%(message)s").format(record) == shown
