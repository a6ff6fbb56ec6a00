"""The README's demonstration, shortened, from a cold store and again."""

from pathlib import Path

import pytest
from programs import run_program

from mergekit_lab.reporting import read_records

MERGERS = {"average", "task_arithmetic", "ties", "dare", "fisher", "tsvm", "epimer"}

_SHORTER = (
    *("progress=false", "search.coefficients=[0.7,1.4]"),
    *("training.steps=60", "training.batch_size=32", "training.validations=1"),
    *(f"suite.tasks.{task}.validation_size=100" for task in ("digits", "mnist", "latin", "style")),
    *(f"suite.tasks.{task}.test_size=200" for task in ("digits", "mnist", "latin", "style")),
)
"""Enough for the order of the rows."""


def run_demo(folder: Path, name: str) -> str:
    done = run_program(
        folder, "+experiment=quickstart", f"run_dir={name}", *_SHORTER, whole=True, COLUMNS="160"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_shows_experts_above_every_merger_above_zero_shot(tmp_path: Path) -> None:
    printed, again = run_demo(tmp_path, "first"), run_demo(tmp_path, "second")
    assert "were computed" in printed

    average: dict[str, list[float]] = {}
    for record in read_records(tmp_path / "first/records.jsonl"):
        average.setdefault(record.label, []).append(record.value)
    mean = {label: sum(values) / len(values) for label, values in average.items()}
    assert set(mean) == MERGERS | {"zero-shot", "experts"}
    assert all(mean["experts"] > mean[merger] > mean["zero-shot"] for merger in MERGERS)
    assert mean["experts"] > 0.9

    assert "evaluations were found in" in again
    assert "were computed" not in again
    assert all(record.reused for record in read_records(tmp_path / "second/records.jsonl"))
    assert len(list((tmp_path / "store/experts").iterdir())) == 4
