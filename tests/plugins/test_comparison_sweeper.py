"""What jobs share and cannot be made is tried once in a sweep, and named by every job that needs it."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from composing import TINY, compose_config
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf

from mergekit_lab.__main__ import main
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.programs import start

ONE_TASK = [*TINY, "~suite.tasks.latin", "joint=false"]
BAD = "1e30"
"""A learning rate after which no loss is finite."""


class Elsewhere:
    """A launcher that is not Hydra's own, as which the sweeper would not train first."""

    def __init__(self, own, launch=None) -> None:
        self.own = own
        self.launch = launch or own.launch


def run_sweep(folder: Path, *arguments: str, launch=None) -> None:
    sweeper, fixed = make_sweeper(folder, [each for each in arguments if "," not in each], launch)
    sweeper.sweep([*fixed, *arguments])


def make_sweeper(folder: Path, single: Sequence[str] = (), launch=None):
    """The sweeper of a small run, with a launcher that is not Hydra's; and what its jobs have in common."""
    GlobalHydra.instance().clear()
    hydra = Hydra.create_main_hydra2("main", create_config_search_path(str(find_conf_dir())))
    fixed = [*ONE_TASK, f"store.root={folder}/store", f"run_dir={folder}/run"]
    sweeper = Plugins.instance().instantiate_sweeper(
        hydra_context=HydraContext(hydra.config_loader, Callbacks()),
        task_function=main.__wrapped__,
        config=hydra.compose_config("main", [*fixed, *single], RunMode.MULTIRUN),
    )
    sweeper.launcher = Elsewhere(sweeper.launcher, launch)
    return sweeper, fixed


def test_a_job_whose_weights_cannot_be_had_keeps_no_other_from_being_planned(
    tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("mergekit_lab.runs.fetch.explain_unreachable", lambda: "no network")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    sweeper, fixed = make_sweeper(tmp_path)
    jobs = sweeper.list_jobs([*fixed, "backbone=clip_vit_b32,glyph_clip"])
    assert list(sweeper.make_runs(jobs)) == [1]
    assert "refused: 1 missing" in caplog.text


@pytest.fixture
def tried(monkeypatch) -> list[int]:
    """One entry a training that was begun."""
    import mergekit_lab.training.fit as room

    begun, finetune = [], room.finetune
    monkeypatch.setattr(room, "finetune", lambda *a, **k: begun.append(1) or finetune(*a, **k))
    monkeypatch.setattr("mergekit_lab.runs.compare.report_runs", lambda *_, **__: None)
    return begun


def read_failures(folder: Path) -> dict[str, str]:
    """What the jobs of a sweep failed with."""
    files = sorted((folder / "run").glob("[0-9]/failure.json"))
    return {file.parent.name: json.loads(file.read_text())["error"] for file in files}


TWO_JOBS = ["merger=average,task_arithmetic", "stage=[finetune,merge]"]


@pytest.mark.parametrize("launcher", ["basic", "other"])
def test_an_expert_that_fails_is_tried_once_a_sweep_and_named_by_the_jobs_that_need_it(
    tmp_path, tried, launcher
) -> None:
    sweeper, fixed = make_sweeper(tmp_path, [f"training.lr={BAD}"])
    if launcher == "basic":
        sweeper.launcher = sweeper.launcher.own
    with pytest.raises(Exception, match="the loss of digits"):
        sweeper.sweep([*fixed, f"training.lr={BAD}", *TWO_JOBS])
    assert len(tried) == 1
    messages = read_failures(tmp_path)
    assert list(messages) == ["0", "1"]
    for job, error in messages.items():
        assert "digits is not finite" in error
        if launcher == "other" or job == "1":
            job_folder = "training/0" if launcher == "other" else "0"
            assert f"could not be made in {tmp_path}/run/{job_folder}, once for all jobs" in error
    left = [path for path in (tmp_path / "run/training").glob("*") if not path.name.isdigit()]
    assert left == [], "a later sweep would not try again"


def test_jobs_that_run_one_after_another_train_what_they_share_once(tmp_path, tried) -> None:
    sweeper, fixed = make_sweeper(tmp_path)
    sweeper.launcher = sweeper.launcher.own
    sweeper.sweep([*fixed, "merger=average,task_arithmetic", "stage=[finetune]", "training.lr=1e-4,2e-4"])
    assert read_failures(tmp_path) == {}
    assert len(tried) == 2


def test_what_a_sweep_failed_at_others_that_share_its_folder_try_for_themselves(tmp_path, tried) -> None:
    """A sweep whose store takes nothing, and meanwhile, beside its jobs, a run with another store."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store/locks").write_text("no folder")
    beside, launchers = [], []

    def launch(jobs, initial_job_idx: int):
        if not jobs[0][-1].startswith("hydra.sweep.subdir=training/"):
            cfg, choices = compose_config([*ONE_TASK, f"store.root={tmp_path}/other", "stage=finetune"])
            beside.append(start(cfg, tmp_path / "run/2", choices, []))
        return launchers[0](jobs, initial_job_idx)

    sweeper, fixed = make_sweeper(tmp_path, launch=launch)
    launchers.append(sweeper.launcher.own.launch)
    with pytest.raises(Exception, match=r"store.root=PATH"):
        sweeper.sweep([*fixed, *TWO_JOBS])
    assert list(read_failures(tmp_path)) == ["0", "1"]
    assert beside == [None]
    assert len(tried) == 1


def launch_in_the_past(jobs, initial_job_idx: int) -> list[JobReturn]:
    """As if jobs ran on machines whose clock, and that of the files' server, is a day behind."""
    for number in range(initial_job_idx, initial_job_idx + len(jobs)):
        mark = Path(
            dict(each.split("=", 1) for each in jobs[0])["run_dir"], str(number), ".hydra/overrides.yaml"
        )
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text("")
        os.utime(mark, ns=(DAY_AGO + number, time.time_ns() - DAY))
    return [JobReturn(status=JobStatus.COMPLETED) for _ in jobs]


DAY = 86_400 * 10**9
DAY_AGO = time.time_ns() - DAY


def test_the_comparison_is_of_all_jobs_of_this_sweep_whatever_the_clocks_say(tmp_path, monkeypatch) -> None:
    """Those too that could not begin, and none of an earlier sweep in the same folder."""
    compared = []
    monkeypatch.setattr(
        "mergekit_lab.runs.compare.report_runs", lambda cfg, jobs, *_, **__: compared.append(jobs)
    )
    launch_in_the_past([[f"run_dir={tmp_path}/run"]], 4)

    def launch(jobs, initial_job_idx: int) -> list[JobReturn]:
        launch_in_the_past(jobs[:1], initial_job_idx)
        raise RuntimeError("a process died")

    with pytest.raises(RuntimeError, match="a process died"):
        run_sweep(tmp_path, "stage=[merge]", "merger=average,task_arithmetic", launch=launch)
    assert [[job.name for job in jobs] for jobs in compared] == [["0", "1"]]


def test_a_trial_whose_process_dies_costs_a_search_no_other(tmp_path, monkeypatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr("mergekit_lab.runs.compare.report_runs", lambda *_, **__: None)
    values = {"average": 0.25, "ties": 0.75}

    def launch(jobs, initial_job_idx: int) -> list[JobReturn]:
        mergers = [next(o.partition("=")[2] for o in job if o.startswith("merger=")) for job in jobs]
        if "task_arithmetic" in mergers:
            raise RuntimeError("a process died")
        results = launch_in_the_past(jobs, initial_job_idx)
        for each, merger in zip(results, mergers, strict=True):
            each.return_value = values[merger]
        return results

    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=12", "hydra.sweeper.n_jobs=6"]
    run_sweep(tmp_path, *search, "stage=[merge]", "merger=average,task_arithmetic,ties", launch=launch)
    results = OmegaConf.load(tmp_path / "run/optimization_results.yaml")
    assert (results.best_value, results.best_params.merger) == (0.75, "ties")
