"""Real sweeps of two jobs on the CPU: each expert is made once, and a comparison stands at the end."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from composing import TINY, compose_config
from end_to_end import slurm
from omegaconf import OmegaConf
from programs import run_program

from mergekit_lab.programs import start
from mergekit_lab.reporting import read_records

ONE_TASK = [*(o for o in TINY if "latin" not in o), "~suite.tasks.latin", "joint=false"]
MERGERS = "merger=average,task_arithmetic"
LAUNCHERS = {
    "local": ["hydra.launcher.devices=[cpu,cpu]"],
    "ray": ["+hydra.launcher.ray.init.num_cpus=2"],
}


def require(module: str, extra: str) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed: it comes with the extra `{extra}`")


def run_sweep(folder: Path, *more: str, whole: bool = False, **environment: str) -> str:
    overrides = ["-m", *ONE_TASK, f"run_dir={folder}/run", *more]
    environment |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = run_program(folder, *overrides, whole=whole, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A store with the expert: where jobs are slow to start, none has to be started for its training."""
    folder = tmp_path_factory.mktemp("trained")
    cfg, choices = compose_config([*ONE_TASK, f"store.root={folder}/store", "stage=finetune"])
    start(cfg, folder / "run", choices, [])
    return folder / "store"


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=pytest.mark.beside if name == "ray" else ()) for name in LAUNCHERS]
)
def test_two_jobs_share_one_expert_and_end_in_one_comparison(launcher, tmp_path) -> None:
    elsewhere = launcher == "ray"  # whose processes have the model that ships
    if elsewhere:
        require(launcher, "launchers")
        run_program(tmp_path, *ONE_TASK, "stage=finetune", "run_dir=trained", whole=True)
    run_sweep(tmp_path, MERGERS, f"hydra/launcher={launcher}", *LAUNCHERS[launcher], whole=elsewhere)
    assert len(list((tmp_path / "store/experts").glob("*/manifest.json"))) == 1
    assert {r.merger for r in read_records(tmp_path / "run/records.jsonl")} == {
        None, "average", "task_arithmetic"}  # fmt: skip


def read_validation_values(store: Path, kind: str) -> list[float]:
    """Of all models of a kind."""
    kept = [json.loads(file.read_text()) for file in store.glob("evaluations/*/manifest.json")]
    models = {folder.name for folder in (store / kind).iterdir()}
    wanted = [e for e in kept if e["content"]["part"] == "validation" and e["content"]["model"] in models]
    return [each["info"]["value"] for each in wanted]


@pytest.mark.slow
def test_a_search_of_two_trials_is_an_array_of_slurm_jobs_and_names_the_better(tmp_path, trained) -> None:
    """Without a cluster: commands of the names of Slurm's run what submitit hands over."""
    require("optuna", "sweepers")
    require("submitit", "launchers")
    shutil.copytree(trained, tmp_path / "store")
    scripts = tmp_path / "bin"
    asked = ["partition=short", "gpus_per_node=2", "timeout_min=30", "mem_gb=8", "array_parallelism=1"]
    run_sweep(
        tmp_path,
        *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=2"),
        *("merger=ties", "merger.coefficient=1.0", "merger.density=interval(0.1,0.9)"),
        *("hydra/launcher=submitit_slurm", *(f"hydra.launcher.{each}" for each in asked)),
        **slurm.install(scripts),
    )
    (script,) = (file.read_text() for file in scripts.glob("*.sh"))
    for line in ("array=0-1%1", "partition=short", "gpus-per-node=2", "time=30", "mem=8GB"):
        assert f"#SBATCH --{line}\n" in script
    results = OmegaConf.load(tmp_path / "run/optimization_results.yaml")
    best = OmegaConf.load(tmp_path / "run" / str(results.best_job) / ".hydra/config.yaml")
    assert best.merger.density == pytest.approx(results.best_params["merger.density"])
    assert best.objective == "normalized"
    (expert,), merged = (read_validation_values(tmp_path / "store", kind) for kind in ("experts", "merged"))
    assert len(merged) == 2
    assert results.best_value == pytest.approx(max(merged) / expert)
    assert {r.merger for r in read_records(tmp_path / "run/records.jsonl")} == {None, "ties"}


def test_a_plan_says_what_two_jobs_would_make_and_makes_nothing(tmp_path) -> None:
    plan = run_sweep(tmp_path, MERGERS, "dry_run=true")
    rows = {line.split()[0]: line.split()[1:4] for line in plan.splitlines() if line and line[0].isalpha()}
    assert rows["experts"] == ["1", "0", "1"]
    assert rows["merged"] == ["2", "0", "2"]
    assert rows["searches"] == ["1", "0", "1"]
    assert rows["evaluations"] == ["5", "0", "5"]
    assert not (tmp_path / "store").exists()
