"""Real sweeps of two jobs on the CPU: each expert is made once, and a comparison stands at the end."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from stages import slurm
from stages.conftest import TINY

JOBS = ["joint=false", "merger=average,task_arithmetic", "~suite.tasks.latin"]
LAUNCHERS = {
    "local": ["hydra.launcher.devices=[cpu,cpu]"],
    "submitit_local": ["hydra.launcher.timeout_min=5", "hydra.launcher.cpus_per_task=1"],
    "ray": ["+hydra.launcher.ray.init.num_cpus=2"],
}
MODULES = {"submitit_local": "submitit", "ray": "ray"}


def sweep(folder: Path, *more: str, **environment: str) -> str:
    ours = [o for o in TINY if "latin" not in o]
    command = [sys.executable, "-m", "mergekit_lab", "-m", *ours, *JOBS, f"store.root={folder}/store"]
    done = subprocess.run(
        [*command, f"run_dir={folder}/run", *more],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"} | environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expect_one_expert_and_a_comparison(folder: Path) -> None:
    assert len(list((folder / "store/experts").glob("*/manifest.json"))) == 1
    records = [json.loads(line) for line in (folder / "run/records.jsonl").read_text().splitlines()]
    assert {r["merger"] for r in records} == {None, "average", "task_arithmetic"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_jobs_share_one_expert_and_end_in_one_comparison(launcher, tmp_path) -> None:
    if launcher in MODULES and find_spec(MODULES[launcher]) is None:
        pytest.skip(f"{MODULES[launcher]} is not installed: it comes with the extra `launchers`")
    sweep(tmp_path, f"hydra/launcher={launcher}", *LAUNCHERS[launcher])
    expect_one_expert_and_a_comparison(tmp_path)


@pytest.mark.slow
def test_slurm_gets_one_array_of_jobs_with_what_they_ask_for(tmp_path) -> None:
    """Without a cluster: commands of the same names run what submitit hands over."""
    if find_spec("submitit") is None:
        pytest.skip("submitit is not installed: it comes with the extra `launchers`")
    bin_folder = tmp_path / "bin"
    found = slurm.install(bin_folder)
    asked = ["partition=short", "gpus_per_node=2", "timeout_min=30", "mem_gb=8", "array_parallelism=1"]
    sweep(
        tmp_path,
        "hydra/launcher=submitit_slurm",
        *(f"hydra.launcher.{each}" for each in asked),
        PATH=f"{bin_folder}:{os.environ['PATH']}",
        **found,
    )
    expect_one_expert_and_a_comparison(tmp_path)
    training, jobs = sorted(
        (file.read_text() for file in bin_folder.glob("*.sh")), key=lambda t: "--array" in t
    )
    assert "--array" not in training
    for line in ("array=0-1%1", "partition=short", "gpus-per-node=2", "time=30", "mem=8GB"):
        assert f"#SBATCH --{line}\n" in jobs


def test_a_plan_says_what_two_jobs_would_make_and_makes_nothing(tmp_path) -> None:
    told = sweep(tmp_path, "dry_run=true")
    rows = {line.split()[0]: line.split()[1:4] for line in told.splitlines() if line and line[0].isalpha()}
    assert rows["experts"] == ["1", "0", "1"]
    assert rows["merged"] == ["2", "0", "2"]
    assert rows["searches"] == ["1", "0", "1"]
    assert rows["evaluations"] == ["5", "0", "5"]
    assert not (tmp_path / "store").exists()
