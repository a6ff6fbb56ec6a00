"""What a user sees on the command line."""

import fcntl
import json
import os

import pytest
from composing import TINY
from programs import run_program

from mergekit_lab.reporting import read_records


def test_help_lists_groups_and_a_way_to_start(tmp_path) -> None:
    done = run_program(tmp_path, "--help")
    assert done.returncode == 0
    for text in ("+experiment=quickstart", "merger=OPTION", "optimizer=OPTION", "--config-dir"):
        assert text in done.stdout


def test_the_composed_configuration_can_be_read(tmp_path) -> None:
    done = run_program(tmp_path, "+experiment=quickstart", "--cfg", "job")
    assert done.returncode == 0
    assert "mergers:" in done.stdout
    assert "hydra:" not in done.stdout
    assert run_program(tmp_path, "--info", "defaults").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["merger=teis"], ["there is no merger 'teis'; did you mean 'ties'?"]),
        (["training.step=20"], ["unknown key 'training.step'; did you mean 'steps'?"]),
        (["+training.lrr=1"], ["unknown key 'training.lrr'", "from the command line", "did you mean 'lr'"]),
        (["merger=ties", "merger.density=2"], ["density is 2; it must be in (0, 1]"]),
        (["backbone.weights=nowhere.pt"], ["nowhere.pt"]),
    ],
)
def test_a_mistake_is_one_message_without_a_traceback(
    tmp_path, arguments: list[str], expected: list[str]
) -> None:
    done = run_program(tmp_path, *arguments, "run_dir=run")
    message = done.stdout + done.stderr
    assert done.returncode == 1, message
    assert "Traceback" not in message
    assert "append" not in message
    for text in expected:
        assert text in message
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("sweep", [[], ["-m", "seed=0,1"]])
def test_a_run_s_folder_that_another_writes_to_is_refused_before_any_work(tmp_path, sweep) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    done = run_program(tmp_path, *sweep, "run_dir=run")
    os.close(held)
    assert done.returncode == 1
    (message,) = done.stderr.splitlines()
    assert "another run" in message
    assert "run_dir=PATH" in message
    assert not list(folder.iterdir())
    again = run_program(tmp_path, *sweep, "run_dir=run", "suite.tasks=7")
    assert "another run" not in again.stderr


@pytest.mark.parametrize("sweep", [[], ["-m", "seed=0,1"]])
def test_a_run_s_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path, sweep) -> None:
    (tmp_path / "file").write_text("")
    done = run_program(tmp_path, *sweep, "run_dir=file/run")
    assert done.returncode == 1
    (message,) = done.stderr.splitlines()
    assert "file/run" in message
    assert "Not a directory" in message
    assert "run_dir=PATH" in message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_full_error_can_be_asked_for(tmp_path) -> None:
    done = run_program(tmp_path, "+sede=1", "run_dir=run", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_misspelled_key_in_a_file_is_named_with_the_file(tmp_path) -> None:
    (tmp_path / "mine/training").mkdir(parents=True)
    (tmp_path / "mine/training/short.yaml").write_text(
        "steps: 1\nbatch_size: 2\nlr: 1e-4\nweight_decay: 0.0\nwarmup_stepz: 0\n"
    )
    done = run_program(tmp_path, "--config-dir", "mine", "training=short", "run_dir=run")
    assert done.returncode == 1
    message = done.stdout + done.stderr
    assert "unknown key 'training.warmup_stepz'" in message
    assert "short.yaml" in message
    assert "did you mean 'warmup_steps'" in message


@pytest.mark.slow
def test_a_sweep_trains_each_expert_once_and_compares_all_jobs_also_when_one_fails(tmp_path) -> None:
    done = run_program(
        tmp_path, "-m", *TINY, "~suite.tasks.latin", "joint=false", "run_dir=sweep", "optimizer=adamw,sam",
        "merger=average,ties", "training.clip_norm=1.0,-1.0", "table=optimizer×merger",
    )  # fmt: skip
    message = done.stdout + done.stderr
    assert done.returncode == 1, message
    assert len(list((tmp_path / "store/experts").glob("*/manifest.json"))) == 2
    records = read_records(tmp_path / "sweep/records.jsonl")
    assert {(r.optimizer, r.merger) for r in records if r.merger} == {
        (o, m) for o in ("adamw", "sam") for m in ("average", "ties")
    }
    titles, _, adamw, sam, *_ = (tmp_path / "sweep/table.md").read_text().splitlines()
    assert titles == "| optimizer × merger | zero-shot | experts | Weight average | TIES |"
    for line, optimizer in ((adamw, "adamw"), (sam, "sam")):
        shares = [r.normalized for r in records if (r.optimizer, r.merger) == (optimizer, "ties")]
        assert f"{100 * sum(shares) / len(shares):.1f}" in line.split(" | ")[4].rstrip(" |")
    summary = (tmp_path / "sweep/summary.md").read_text()
    assert summary.count("training.clip_norm is -1.0") == 4
    assert "python -m mergekit_lab --multirun" in summary
    page = (tmp_path / "sweep/report.html").read_text()
    assert page.count("<summary>How ") == 4
    assert "merger=ties" in page
    jobs = [p for p in (tmp_path / "sweep").iterdir() if p.name.isdigit()]
    assert len(jobs) == 8
    assert sum((p / "failure.json").is_file() for p in jobs) == 4
    assert "clip_norm=-1.0" in " ".join(
        json.loads((jobs[0].parent / "1/failure.json").read_text())["overrides"]
    )
