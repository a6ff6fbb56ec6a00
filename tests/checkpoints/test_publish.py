"""A folder appears whole or not at all."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from programs import start_program
from safetensors.torch import save_file

import mergekit_lab
from mergekit_lab import InputError
from mergekit_lab.checkpoints import (
    Checkpoint,
    TensorSpec,
    make_folder,
    publish,
)
from mergekit_lab.checkpoints.publish import RECORD, check_out
from mergekit_lab.merging import TSVM, TaskArithmetic


def test_an_error_leaves_nothing(tmp_path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        assert not (tmp_path / "out").exists()
        raise RuntimeError

    with pytest.raises(RuntimeError), make_folder(tmp_path / "out") as folder:
        fail(folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exchanges", [True, False])
def test_overwriting_replaces_a_merge_and_nothing_else(exchanges: bool, tmp_path, monkeypatch) -> None:
    if not exchanges:
        monkeypatch.setattr(publish, "exchange", lambda one, other: False)
    out = tmp_path / "out"
    with make_folder(out) as folder:
        (folder / RECORD).write_text("1")
        (folder / "old").write_text("")
    with pytest.raises(InputError, match="set overwrite=true"), make_folder(out):
        pass
    with pytest.raises(RuntimeError), make_folder(out, overwrite=True):
        raise RuntimeError
    assert (out / "old").exists()
    with make_folder(out, overwrite=True) as folder:
        (folder / "new").write_text("")
    assert [p.name for p in out.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(InputError, match="not written by"), make_folder(out, overwrite=True):
        pass


def test_places_that_must_not_be_written_are_refused(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    weights = tmp_path / "in/model.safetensors"
    weights.write_text("")
    for out in (tmp_path / "in", tmp_path):
        with pytest.raises(InputError, match=r"model\.safetensors"):
            check_out(out, True, [weights])
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path / "x.safetensors", weights, tmp_path / "pipe"):
        with pytest.raises(InputError, match="is a file"):
            check_out(out, True)
    with pytest.raises(InputError, match="cannot hold a model"):
        check_out(type(tmp_path)("/"), True)
    (tmp_path / "empty").mkdir()
    check_out(tmp_path / "empty", False, [weights])
    with pytest.raises(InputError, match=r"model\.safetensors is a file"):
        check_out(weights / "deep/out", False)


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_there_is_no_moment_without_the_old_folder_or_the_new_one(tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    with make_folder(out) as folder:
        (folder / RECORD).write_text("old")

    def refuse(self, target):
        raise AssertionError(f"{self} was renamed")

    with make_folder(out, overwrite=True) as folder:
        (folder / RECORD).write_text("new")
        monkeypatch.setattr(Path, "rename", refuse)
    assert (out / RECORD).read_text() == "new"
    assert list(tmp_path.iterdir()) == [out]


BETWEEN = """
import os, signal, sys
from pathlib import Path
from mergekit_lab.checkpoints import make_folder, publish
publish.exchange = lambda one, other: False
rename = Path.rename
def die(self, target):
    done = rename(self, target)
    if self.name == "out":
        os.kill(os.getpid(), signal.SIGKILL)
    return done
with make_folder(Path(sys.argv[1]), overwrite=True) as folder:
    (folder / "mergekit_lab.json").write_text("new")
    Path.rename = die
"""


def test_what_a_merge_killed_between_two_renames_moved_away_is_put_back(tmp_path) -> None:
    with make_folder(tmp_path / "out") as folder:
        (folder / RECORD).write_text("old")
    start_program(tmp_path, str(tmp_path / "out"), code=BETWEEN).wait()
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="set overwrite=true"), make_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / RECORD).read_text() == "old"
    with make_folder(tmp_path / "out", overwrite=True):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("also", ["made again", "gone"])
def test_a_folder_that_is_removed_while_it_is_filled_is_not_published(also: str, tmp_path) -> None:
    out = tmp_path / "out"
    with make_folder(out) as folder:
        (folder / RECORD).write_text("old")

    def fill(folder: Path) -> None:
        with (folder / "model.safetensors").open("w") as weights:
            shutil.rmtree(folder)
            weights.write("into nothing")
        if also == "made again":
            folder.mkdir()
        (folder / RECORD).write_text("new")

    with (
        pytest.raises(InputError, match=r"untouched: .* was removed"),
        make_folder(out, overwrite=True) as folder,
    ):
        fill(folder)
    assert (out / RECORD).read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


class Clearing(Checkpoint):
    """A model beside which somebody clears up while it is merged."""

    def __init__(self, tensors: dict[str, torch.Tensor], folder: Path, after: int) -> None:
        super().__init__("the base", {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in tensors.items()})
        self.tensors, self.cleared, self.left = tensors, folder, after

    def __getitem__(self, name: str) -> torch.Tensor:
        self.left -= 1
        for partial in self.cleared.glob(".*.partial") if self.left == 0 else ():
            while partial.exists():  # a file may be made in it meanwhile
                shutil.rmtree(partial, ignore_errors=True)
        return self.tensors[name]


@pytest.mark.parametrize("after", [1, 6])
@pytest.mark.parametrize("limit", [1, 10**9])
def test_a_merge_whose_folder_is_removed_does_not_say_that_it_succeeded(after, limit, tmp_path) -> None:
    state = {f"w{n}": torch.randn(4, 4) for n in range(6)}
    out = mergekit_lab.merge(state, [state], tmp_path / "out", TaskArithmetic(), device="cpu")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    base = Clearing(state, tmp_path, after)
    with pytest.raises(InputError, match="was removed"):
        mergekit_lab.merge(
            base, [state], out, TaskArithmetic(), device="cpu", overwrite=True, max_shard_bytes=limit
        )
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("left", [None, b"", b"123", b"12345"])
def test_a_folder_without_what_was_planned_is_not_published(left: bytes | None, tmp_path) -> None:
    def fill(folder: Path) -> None:
        (folder / "other").touch()
        if left is not None:
            (folder / "model.safetensors").write_bytes(left)

    with (
        pytest.raises(InputError, match=r"\(model\.safetensors\)"),
        make_folder(tmp_path / "out", planned={"model.safetensors": 4, "other": 0}) as folder,
    ):
        fill(folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("dense", RECORD),
        ("dense", "config.json"),
        ("low_rank", "low_rank.json"),
        ("adapter", "adapter_model.safetensors"),
        ("adapter", "README.md"),
    ],
)
def test_a_merge_that_loses_a_file_of_any_kind_does_not_say_that_it_succeeded(
    format, name, tmp_path, monkeypatch
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file({"q_proj.weight": torch.eye(4)}, base / "model.safetensors")
    (base / "config.json").write_text("{}")
    sync = publish.sync_tree

    def lose(folder: Path) -> None:
        sync(folder)
        (folder / name).unlink()

    monkeypatch.setattr(publish, "sync_tree", lose)
    expert, rank = {"q_proj.weight": torch.ones(4, 4)}, 1 if format == "adapter" else None
    with pytest.raises(InputError, match=rf"lost .*\({name}\)"):
        mergekit_lab.merge(base, [expert], tmp_path / "out", TSVM(), device="cpu", format=format, rank=rank)
    assert not (tmp_path / "out").exists()


def test_two_merges_of_one_host_and_process_number_do_not_touch_each_other(tmp_path) -> None:
    """As in containers that share the host's name: each counts its processes from 1."""

    def write_elsewhere(first: Path) -> None:
        (first / "file").write_text("first")
        with pytest.raises(InputError, match="has to stop"), make_folder(tmp_path / "out"):
            raise InputError("has to stop")
        assert (first / "file").read_text() == "first"
        with make_folder(tmp_path / "out") as second:
            (second / "file").write_text("second")
        assert (first / "file").read_text() == "first"

    with pytest.raises(InputError, match="not empty"), make_folder(tmp_path / "out") as folder:
        write_elsewhere(folder)
    assert (tmp_path / "out/file").read_text() == "second"


@pytest.mark.parametrize("target", ["merge", "empty", "nothing"])
def test_where_out_is_a_link_what_it_leads_to_is_written_and_the_link_stays(target: str, tmp_path) -> None:
    model, link = tmp_path / "disk/model", tmp_path / "out"
    if target == "merge":
        with make_folder(model) as folder:
            (folder / RECORD).write_text("old")
    elif target == "empty":
        model.mkdir(parents=True)
    link.symlink_to(model)
    with make_folder(link, overwrite=target == "merge") as folder:
        (folder / RECORD).write_text("new")
    assert link.is_symlink()
    assert (model / RECORD).read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "out"]
    assert [p.name for p in model.parent.iterdir()] == ["model"]


KILLED = """
import sys, time, torch
from pathlib import Path
from mergekit_lab.checkpoints import ShardedWriter, TensorSpec, make_folder
specs = {str(n): TensorSpec((1000,), torch.float32) for n in range(100)}
with make_folder(Path(sys.argv[1])) as folder, ShardedWriter(folder, specs, 40_000) as writer:
    for name in specs:
        writer.write(name, torch.ones(1000))
        print(name, flush=True)
        time.sleep(0.02)
"""


@pytest.mark.parametrize("name", ["out", "n" * 240, "n" * 255, "é" * 127])
def test_a_killed_process_leaves_nothing_that_looks_finished_and_the_next_one_clears_it(name, tmp_path) -> None:
    out = tmp_path / name
    program = start_program(tmp_path, str(out), code=KILLED)
    program.wait_for("30")
    (left,) = tmp_path.iterdir()
    with pytest.raises(InputError, match="has to stop"), make_folder(out):
        raise InputError("has to stop")
    assert list(tmp_path.iterdir()) == [left]
    os.kill(program.pid, signal.SIGKILL)
    assert program.wait().returncode == -signal.SIGKILL
    assert left.name.startswith(f".{name[:70]}")
    assert left.name.endswith(".partial")
    assert not list(left.glob("*.json"))
    with make_folder(out) as folder:
        (folder / "done").write_text("")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_an_empty_folder_that_never_came_to_its_name_is_cleared(tmp_path) -> None:
    """A kill falls between the making of a folder and its renaming; what just began may still be somebody's."""
    old, new, full = (tmp_path / f".{digit * 12}.making" for digit in "abc")
    for folder in (old, new, full):
        folder.mkdir()
    (full / "somebody's").write_text("")
    for folder in (old, full):
        os.utime(folder, (0, 0))
    with make_folder(tmp_path / "out"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"out", new.name, full.name}


def test_remains_of_another_machine_are_named_and_stay(tmp_path, caplog) -> None:
    """A lock says nothing of who holds it there."""
    with make_folder(tmp_path / "out") as folder:
        here = folder.name
    _, name, boot, token, suffix = here.split(".")
    (tmp_path / f".{name}.{boot[::-1]}.{token}.{suffix}").mkdir()
    with make_folder(tmp_path / "out", overwrite=True):
        pass
    assert len(list(tmp_path.iterdir())) == 2
    assert "left by another machine" in caplog.text


@pytest.mark.parametrize("name", ["n" * 256, "a\0b", "loop/out"])
def test_a_name_that_no_folder_can_have_is_refused(name: str, tmp_path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=r"cannot be a folder|cannot be made"):
        check_out(tmp_path / name, False)


def test_where_the_working_folder_was_deleted_a_relative_name_is_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(InputError, match="cannot be a folder"):
        check_out(Path("out"), False)
    with make_folder(tmp_path / "out") as folder:
        (folder / "file").touch()
