"""Signals, too little memory and cut checkpoints: training stops or goes on as told."""

import logging
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from composing import TINY, compose_config
from tiny import TinyEncoder, make_tiny_objective

from mergekit_lab import InputError
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.training import TrainingSettings, finetune

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")
SETTINGS = TrainingSettings(steps=12, batch_size=8, lr=1e-2, weight_decay=0.0, validations=3, keep="last")


def train(resume: Path, head, on_metrics=None, identity: str = "expert a", model=None, **settings):
    return finetune(
        model or TinyEncoder(),
        {"a": make_tiny_objective(head)},
        lambda named: torch.optim.SGD([p for _, p in named], lr=1e-2, momentum=0.9),
        replace(SETTINGS, **settings),
        seed=0,
        resume=resume,
        identity=identity,
        trainer={"accelerator": "cpu", "enable_progress_bar": False},
        on_metrics=on_metrics,
    )


@pytest.mark.parametrize(
    ("number", "at"), [(signal.SIGTERM, 6), (signal.SIGINT, 6), (signal.SIGTERM, 7), (signal.SIGINT, 11)]
)
def test_a_signal_stops_after_the_step_and_training_goes_on_bit_for_bit(tmp_path, head, number, at) -> None:
    """Also where a validation is due after that step, where it was the last, which is then made again, and
    where the signal comes twice at once: from a terminal and from the process that employs this one."""

    def look(metrics, step: int) -> None:
        if step == at and "train_loss" in metrics:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", head, look)
    assert signal.getsignal(number) is before
    last = torch.load(tmp_path / "cut/last.ckpt", weights_only=True)["global_step"]
    assert last in ((at, at + 1) if at + 1 < SETTINGS.steps else (8,))
    resumed, whole = train(tmp_path / "cut", head), train(tmp_path / "whole", head)
    assert (resumed.val_accuracy, resumed.step) == (whole.val_accuracy, whole.step)
    assert resumed.curve == whole.curve
    assert all(torch.equal(value, whole.state[name]) for name, value in resumed.state.items())


def cut_short(folder: Path) -> None:
    (folder / "last.ckpt").write_bytes((folder / "last.ckpt").read_bytes()[:2000])


def flip_a_bit_of_the_weights(folder: Path) -> None:
    saved = bytearray((folder / "last.ckpt").read_bytes())
    with ZipFile(folder / "last.ckpt") as archive:
        (largest,) = sorted(archive.infolist(), key=lambda each: each.file_size)[-1:]
    saved[largest.header_offset + 200] ^= 1
    (folder / "last.ckpt").write_bytes(saved)


def save_other_weights_there(folder: Path) -> None:
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    others = {name: value + 1 for name, value in saved["state_dict"].items()}
    torch.save(saved | {"state_dict": others}, folder / "last.ckpt")


def change_what_is_inside(file: Path, change) -> None:
    """With checksums that fit, and all else as it was."""
    with ZipFile(file) as archive:
        inside, comment = {entry: archive.read(entry) for entry in archive.infolist()}, archive.comment
    with ZipFile(file, "w") as archive:
        for entry, content in inside.items():
            archive.writestr(entry, change(entry.filename, content))
        archive.comment = comment


def change_the_weights(folder: Path) -> None:
    def change(name: str, content: bytes) -> bytes:
        return bytes([content[0] ^ 1]) + content[1:] if "/data/" in name else content

    change_what_is_inside(folder / "last.ckpt", change)


def change_the_step(folder: Path) -> None:
    step = torch.load(folder / "last.ckpt", weights_only=True)["global_step"]
    wanted = b"global_step"

    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return content
        at = content.index(bytes([step]), content.index(wanted) + len(wanted))
        return content[:at] + bytes([step - 1]) + content[at + 1 :]

    change_what_is_inside(folder / "last.ckpt", change)
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == step - 1


def change_the_best(folder: Path) -> None:
    change_what_is_inside(
        folder / "best.ckpt", lambda name, content: content[::-1] if "/data/" in name else content
    )


def put_a_pipe_there(folder: Path) -> None:
    (folder / "last.ckpt").unlink()
    os.mkfifo(folder / "last.ckpt")


def put_a_pipe_in_the_best_s_place(folder: Path) -> None:
    (folder / "best.ckpt").unlink()
    os.mkfifo(folder / "best.ckpt")


def put_a_device_there(folder: Path) -> None:
    (folder / "last.ckpt").unlink()
    (folder / "last.ckpt").symlink_to("/dev/zero")


def lose_the_best(folder: Path) -> None:
    (folder / "best.ckpt").unlink()


def empty_the_best(folder: Path) -> None:
    (folder / "best.ckpt").write_bytes(b"")


def pack_again(folder: Path) -> None:
    """As archivers do: compressed."""
    for file in folder.glob("*.ckpt"):
        with ZipFile(file) as archive:
            inside, comment = {n: archive.read(n) for n in archive.namelist()}, archive.comment
        with ZipFile(file, "w", ZIP_DEFLATED) as archive:
            for name, content in inside.items():
                archive.writestr(name, content)
            archive.comment = comment


def move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def stop_at_6(metrics, step: int) -> None:
    if step == 6 and "train_loss" in metrics:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def whole_and_cut(tmp_path_factory, head):
    """What training gives, and the folder of one that was stopped after its best weights."""
    folder = tmp_path_factory.mktemp("best")

    with pytest.raises(KeyboardInterrupt):
        train(folder / "cut", head, stop_at_6, keep="best")
    return train(folder / "whole", head, keep="best"), folder / "cut"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "last.ckpt ("),
        (flip_a_bit_of_the_weights, "in it is damaged"),
        (save_other_weights_there, "last.ckpt (it is not as"),
        (change_the_weights, "last.ckpt (it is not as"),
        (change_the_step, "last.ckpt (it is not as"),
        (change_the_best, "best.ckpt (it is not as"),
        (put_a_pipe_there, "last.ckpt is neither file nor folder"),
        (put_a_pipe_in_the_best_s_place, "best.ckpt is neither file nor folder"),
        (put_a_device_there, "last.ckpt is neither file nor folder"),
        (lose_the_best, "best.ckpt ("),
        (empty_the_best, "best.ckpt ("),
        (move, ""),
        (pack_again, ""),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_weights_are_those_of_an_undisturbed_training(
    tmp_path, head, caplog, whole_and_cut, damage, message: str
) -> None:
    whole, cut = whole_and_cut
    shutil.copytree(cut, tmp_path / "cut")
    damage(tmp_path / "cut")
    with caplog.at_level(logging.INFO, "mergekit_lab"):
        again = train(next(tmp_path.iterdir()), head, keep="best")
    assert message in caplog.text
    assert ("resuming from" in caplog.text) == (not message)
    assert (again.step, again.val_accuracy) == (whole.step, whole.val_accuracy)
    assert all(torch.equal(value, whole.state[name]) for name, value in again.state.items())


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_checkpoint_of_another_expert_is_named_and_not_resumed(
    tmp_path, head, caplog, whole_and_cut, name
) -> None:
    whole, cut = whole_and_cut
    shutil.copytree(cut, tmp_path / "ours")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "other", head, stop_at_6, keep="best", identity="expert b")
    shutil.copy(tmp_path / f"other/{name}.ckpt", tmp_path / f"ours/{name}.ckpt")
    again = train(tmp_path / "ours", head, keep="best")
    assert f"{name}.ckpt (it is of another training)" in caplog.text
    assert all(torch.equal(value, whole.state[n]) for n, value in again.state.items())


def test_a_checkpoint_trained_from_other_weights_is_named_and_not_resumed(
    tmp_path, head, caplog, whole_and_cut
) -> None:
    shutil.copytree(whole_and_cut[1], tmp_path / "cut")
    others = []
    for folder in ("cut", "afresh"):
        model = TinyEncoder()
        with torch.no_grad():
            next(model.parameters())[0].mul_(1.001)
        others.append(train(tmp_path / folder, head, keep="best", model=model).state)
    assert "last.ckpt (it was trained" in caplog.text
    assert all(torch.equal(value, others[1][name]) for name, value in others[0].items())


def test_weights_that_training_ends_with_are_in_no_file(tmp_path, head) -> None:
    kept = [train(tmp_path / keep, head, keep=keep, validations=1) for keep in ("best", "last")]
    assert not list(tmp_path.rglob("*.ckpt"))
    assert [each.step for each in kept] == [SETTINGS.steps] * 2
    assert all(torch.equal(value, kept[1].state[name]) for name, value in kept[0].state.items())


def test_a_pipe_where_a_checkpoint_is_written_first_is_removed(tmp_path, head) -> None:
    os.mkfifo(tmp_path / "last.part")
    assert train(tmp_path, head).step == SETTINGS.steps
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.ckpt"]


@pytest.mark.parametrize("name", ["last.ckpt", "best.ckpt", "last.part"])
def test_a_folder_where_a_checkpoint_belongs_is_refused_by_name(tmp_path, head, name) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=rf"{name} is a folder.*move it away"):
        train(tmp_path, head)
    assert (tmp_path / name).is_dir()


def test_a_file_in_the_place_of_the_folder_is_refused_by_name(tmp_path, head) -> None:
    (tmp_path / "resume").write_text("")
    with pytest.raises(InputError, match=r"not a folder"):
        train(tmp_path / "resume", head)


def limit_memory(limit: int, monkeypatch) -> list[int]:
    """Micro-batches above so many images do not fit; what was tried."""
    from mergekit_lab.training.module import FinetuneModule

    tried, loss = [], FinetuneModule.compute_loss

    def compute_or_fail(self, batch, total):
        (images, _), *_ = batch.values()
        tried.append(len(images))
        if len(images) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss(self, batch, total)

    monkeypatch.setattr(FinetuneModule, "compute_loss", compute_or_fail)
    return tried


def list_finetuned(tmp_path: Path, *overrides: str) -> list[Path]:
    from mergekit_lab.programs import start

    cfg, choices = compose_config(
        [*TINY, f"store.root={tmp_path}/store", "stage=finetune", "joint=false", *overrides]
    )
    start(cfg, tmp_path / "run", choices, [])
    return sorted((tmp_path / "store/experts").glob("*/manifest.json"))


def test_out_of_memory_halves_the_micro_batches_until_they_fit(tmp_path, monkeypatch) -> None:
    tried = limit_memory(4, monkeypatch)
    assert len(list_finetuned(tmp_path, "~suite.tasks.latin")) == 1
    assert tried[:3] == [16, 8, 4]
    assert set(tried[2:]) == {4}


def test_one_sample_that_does_not_fit_says_what_to_set(tmp_path, monkeypatch) -> None:
    limit_memory(0, monkeypatch)
    with pytest.raises(InputError, match=r"accumulate=16 \(CUDA.*training.batch_size"):
        list_finetuned(tmp_path, "~suite.tasks.latin")


def test_only_options_of_processes_put_their_number_into_an_expert_s_key(tmp_path) -> None:
    from mergekit_lab.runs.run import Run

    def make_key(*overrides: str) -> dict:
        cfg, choices = compose_config([*TINY, f"store.root={tmp_path}", *overrides])
        return declare_expert(Run(cfg, tmp_path, choices), "digits").content

    two = ["trainer=ddp", "trainer.processes=2"]
    assert (
        make_key()
        == make_key(*two)
        == make_key("device=[cpu,cpu]")
        == make_key("trainer=fsdp", "trainer.processes=2")
    )
    assert make_key("optimizer=sam") == make_key("optimizer=sam", *two)
    for own in (
        ["optimizer=sam", "optimizer.sync_ascent=false"],
        ["optimizer=mergopt", "optimizer.per_rank=true"],
    ):
        assert make_key(*own, *two) == make_key(*own) | {"processes": 2}
        assert make_key(*own, *two) != make_key(*own, "trainer=ddp", "trainer.processes=3")
