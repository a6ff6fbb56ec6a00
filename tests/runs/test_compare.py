"""Runs without a result are named when they are compared."""

import json
import re
from pathlib import Path

import pytest
from composing import go

from mergekit_lab import InputError


def test_a_number_is_the_name_of_a_run_s_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("0").mkdir()
    Path("0/failure.json").write_text(json.dumps({"error": "lost"}))
    for runs in ("0", "[0]"):
        with pytest.raises(InputError, match=rf"no run of runs={re.escape(runs)} has a result"):
            go(tmp_path / "out", tmp_path / "none", "stage=report", f"runs={runs}")


def test_a_comparison_of_runs_that_all_failed_says_so_of_each_and_fails(tmp_path, caplog) -> None:
    for job in ("0", "1"):
        (tmp_path / "sweep" / job).mkdir(parents=True)
        (tmp_path / "sweep" / job / "failure.json").write_text(json.dumps({"error": f"lost {job}"}))
    with pytest.raises(InputError, match=r"runs=.*summary\.md"):
        go(tmp_path / "out", tmp_path / "none", "stage=report", f"runs={tmp_path}/sweep")
    messages = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line.partition("sweep/")[2] for line in messages] == ["0: lost 0", "1: lost 1"]
    assert "lost 1" in (tmp_path / "out" / "report.html").read_text()
    with pytest.raises(InputError, match="has a result"):
        go(tmp_path / "out", tmp_path / "none", "stage=report", f"runs={tmp_path}/sweep/0")
    assert "<h1>Comparison of 1 run</h1>" in (tmp_path / "out" / "report.html").read_text()
