import csv
import struct

import pytest

from mergekit_lab import InputError
from mergekit_lab.reporting import CsvTracker, Start, TensorBoardTracker, Tracker
from mergekit_lab.reporting.leaderboard import build_table


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def start_tracker(folder):
    tracker = CsvTracker()
    tracker.start(Start({"seed": 0}, folder, name="n"))
    return tracker


def test_metrics_are_rows_under_their_names(tmp_path):
    tracker = start_tracker(tmp_path / "run")
    tracker.log({"loss": 2.5}, step=1)
    tracker.log({"loss": 1.0 / 3.0}, step=2)
    tracker.finish()
    assert read_rows(tmp_path / "run" / "metrics.csv") == [
        {"step": "1", "loss": "2.5"},
        {"step": "2", "loss": repr(1.0 / 3.0)},
    ]


def test_a_metric_met_later_adds_a_column_and_loses_nothing(tmp_path):
    tracker = start_tracker(tmp_path)
    tracker.log({"loss": 2.0}, step=1)
    tracker.log({"accuracy, top 1": 0.5}, step=2)
    tracker.log({"loss": 1.0}, step=1)
    assert read_rows(tmp_path / "metrics.csv") == [
        {"step": "1", "loss": "2.0", "accuracy, top 1": ""},
        {"step": "2", "loss": "", "accuracy, top 1": "0.5"},
        {"step": "1", "loss": "1.0", "accuracy, top 1": ""},
    ]


def test_a_resumed_run_goes_on_after_a_line_that_was_cut_off(tmp_path):
    tracker = start_tracker(tmp_path)
    tracker.log({"loss": 2.0, "lr": 0.1}, step=1)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,1.")
    start_tracker(tmp_path).log({"lr": 0.2, "loss": 0.5}, step=3)
    assert read_rows(tmp_path / "metrics.csv") == [
        {"step": "1", "loss": "2.0", "lr": "0.1"},
        {"step": "2", "loss": "1.", "lr": ""},
        {"step": "3", "loss": "0.5", "lr": "0.2"},
    ]


def damage(folder, how):
    if how == "a directory":
        (folder / "metrics.csv").mkdir()
        (folder / "tensorboard").write_text("not a folder")
    elif how == "bad text":
        (folder / "metrics.csv").write_bytes(b"step,loss\n0,\xff\xfe\n")
    else:
        (folder / "metrics.csv").symlink_to("/dev/full")


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (CsvTracker, "a directory"),
        (CsvTracker, "bad text"),
        (CsvTracker, "a full disk"),
        (TensorBoardTracker, "a directory"),
        (TensorBoardTracker, "nothing"),
    ],
)
def test_whatever_fails_costs_one_warning_and_never_the_run(make, how, tmp_path, record, caplog):
    tracker = make()
    if how in ("a directory", "bad text"):
        damage(tmp_path, how)
    for job in ("finetune", "evaluate"):
        tracker.start(Start({}, tmp_path, name="n", job_type=job))
        if how == "a full disk" and job == "finetune":
            tracker.log({"loss": 1.0}, step=0)
            (tmp_path / "metrics.csv").unlink()
            damage(tmp_path, how)
        tracker.log({"loss": 1.0}, step=1)
        tracker.log_summary(build_table([record()]))
        tracker.log_figure("f", tmp_path / "none.png")
        if how == "a full disk":
            (tmp_path / "metrics.csv").unlink(missing_ok=True)
        tracker.finish()
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("mergekit_lab")]
    assert warning.startswith(f"{tracker.name}: ")
    assert " failed: " in warning


def test_the_base_tracker_writes_nothing(tmp_path, record):
    tracker = Tracker()
    tracker.start(Start({}, tmp_path, name="n", group="g", job_type="j"))
    tracker.log({"loss": 1.0}, step=0)
    tracker.log_summary(build_table([record()]))
    tracker.log_figure("f", tmp_path / "none.png")
    tracker.finish()
    assert not list(tmp_path.iterdir())


def read_events(folder):
    """Names, steps and values of an event file: length, checksum, message, checksum, and so on."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.glob("events.*")
    content, position, events = file.read_bytes(), 0, []
    while position < len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        event = Event()
        event.ParseFromString(content[position + 12 : position + 12 + length])
        events += [(value.tag, event.step, value) for value in event.summary.value]
        position += 16 + length
    return events


def test_tensorboards_files_hold_metrics_the_leaderboard_and_figures_by_job(tmp_path, record):
    from PIL import Image

    Image.new("RGB", (100, 100)).save(tmp_path / "figure.png")
    tracker = TensorBoardTracker()
    for job in ("finetune", "evaluate"):
        tracker.start(Start({}, tmp_path / "run", name="n", job_type=job))
        tracker.log({f"{job}/loss": 2.5}, step=7)
        tracker.log_summary(build_table([record(value=0.6, expert_value=0.8)]))
        tracker.log_figure("mergers", tmp_path / "figure.png")
        tracker.finish()
    logged = {
        tag: (step, value) for tag, step, value in read_events(tmp_path / "run" / "tensorboard" / "evaluate")
    }
    assert (logged["evaluate/loss"][0], logged["evaluate/loss"][1].simple_value) == (7, 2.5)
    assert logged["ties/normalized"][1].simple_value == pytest.approx(0.75)
    assert (logged["mergers"][1].image.height, logged["mergers"][1].image.width) == (100, 100)
    assert "finetune/loss" not in logged


def test_without_the_library_tensorboard_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(InputError, match=r"'mergekit_lab\[tensorboard\]'"):
        TensorBoardTracker()


def test_a_metric_is_no_formula_of_a_spreadsheet_and_a_run_goes_on_in_its_file(tmp_path):
    tracker = CsvTracker()
    for step in (1, 2):
        tracker.start(Start({}, tmp_path, name="run"))
        tracker.log({"=cmd/train_loss": -0.5}, step)
        tracker.finish()
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,'=cmd/train_loss", "1,-0.5", "2,-0.5"]
