"""Real sweeps of two jobs on the CPU: each expert is made once, and a comparison stands at the end."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from stages.conftest import TINY

JOBS = ["joint=false", "merger=average,task_arithmetic", "~suite.tasks.latin"]
LAUNCHERS = {
    "local": ["hydra.launcher.devices=[cpu,cpu]"],
    "submitit_local": ["hydra.launcher.timeout_min=5", "hydra.launcher.cpus_per_task=1"],
    "ray": ["+hydra.launcher.ray.init.num_cpus=2"],
}
MODULES = {"submitit_local": "submitit", "ray": "ray"}


def sweep(folder: Path, *more: str) -> str:
    ours = [o for o in TINY if "latin" not in o]
    command = [sys.executable, "-m", "mergekit_lab", "-m", *ours, *JOBS, f"store.root={folder}/store"]
    done = subprocess.run(
        [*command, f"run_dir={folder}/run", *more],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_jobs_share_one_expert_and_end_in_one_comparison(launcher, tmp_path) -> None:
    if launcher in MODULES and find_spec(MODULES[launcher]) is None:
        pytest.skip(f"{MODULES[launcher]} is not installed: it comes with the extra `launchers`")
    sweep(tmp_path, f"hydra/launcher={launcher}", *LAUNCHERS[launcher])
    assert len(list((tmp_path / "store/experts").glob("*/manifest.json"))) == 1
    records = [json.loads(line) for line in (tmp_path / "run/records.jsonl").read_text().splitlines()]
    assert {r["merger"] for r in records} == {None, "average", "task_arithmetic"}


def test_a_plan_says_what_two_jobs_would_make_and_makes_nothing(tmp_path) -> None:
    told = sweep(tmp_path, "dry_run=true")
    rows = {line.split()[0]: line.split()[1:4] for line in told.splitlines() if line and line[0].isalpha()}
    assert rows["experts"] == ["1", "0", "1"]
    assert rows["merged"] == ["2", "0", "2"]
    assert rows["searches"] == ["1", "0", "1"]
    assert rows["evaluations"] == ["5", "0", "5"]
    assert not (tmp_path / "store").exists()
