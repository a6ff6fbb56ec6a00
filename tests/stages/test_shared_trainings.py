"""What jobs share and cannot be made is tried once in a sweep, and named by every job that needs it."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf
from stages.conftest import TINY

from mergekit_lab.__main__ import main
from mergekit_lab.paths import conf_dir

BAD = "1e30"
"""A learning rate after which no loss is finite."""


class Elsewhere:
    """A launcher that is not Hydra's own, as which the sweeper would not train first."""

    def __init__(self, launch) -> None:
        self.launch = launch


def sweep(folder: Path, *arguments: str, launch=None) -> None:
    sweeper, fixed = sweeper_of(folder, [each for each in arguments if "," not in each], launch)
    sweeper.sweep([*fixed, *arguments])


def sweeper_of(folder: Path, single: Sequence[str] = (), launch=None):
    """The sweeper of a small run, with a launcher that is not Hydra's; and what its jobs have in common."""
    GlobalHydra.instance().clear()
    hydra = Hydra.create_main_hydra2("main", create_config_search_path(str(conf_dir())))
    fixed = [*TINY, "~suite.tasks.latin", "joint=false", f"store.root={folder}/store", f"run_dir={folder}/run"]
    sweeper = Plugins.instance().instantiate_sweeper(
        hydra_context=HydraContext(hydra.config_loader, Callbacks()),
        task_function=main.__wrapped__,
        config=hydra.compose_config("main", [*fixed, *single], RunMode.MULTIRUN),
    )
    sweeper.launcher = Elsewhere(launch or sweeper.launcher.launch)
    return sweeper, fixed


def test_a_job_whose_weights_cannot_be_had_keeps_no_other_from_being_planned(
    tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("mergekit_lab.stages.preflight.unreachable", lambda: "no network")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    sweeper, fixed = sweeper_of(tmp_path)
    jobs = sweeper._jobs([*fixed, "backbone=clip_vit_b32,glyph_clip"])
    assert list(sweeper._contexts(jobs)) == [1]
    assert "#0 will be refused: 1 things this run needs are not here" in caplog.text


def test_an_expert_that_fails_is_tried_once_a_sweep_and_named_by_the_jobs_that_need_it(
    tmp_path, monkeypatch
) -> None:
    import mergekit_lab.stages.finetune as room

    tried, finetune = [], room.finetune
    monkeypatch.setattr(room, "finetune", lambda *a, **k: tried.append(1) or finetune(*a, **k))
    monkeypatch.setattr("mergekit_lab.stages.report.report_sweep", lambda *_: None)
    jobs = [f"training.lr={BAD}", "merger=average,task_arithmetic", "stages=[finetune,merge]"]
    with pytest.raises(Exception, match=r"digits .*could not be made in training/0, once for all jobs"):
        sweep(tmp_path, *jobs)
    assert len(tried) == 1
    failures = sorted((tmp_path / "run").glob("[0-9]/failure.json"))
    assert [file.parent.name for file in failures] == ["0", "1"]
    for file in failures:
        assert "the loss of digits is not finite" in json.loads(file.read_text())["error"]
    assert not list((tmp_path / "run/training").glob("*.json")), "a later sweep would not try again"


def begins(jobs, initial_job_idx: int) -> list[JobReturn]:
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
    monkeypatch.setattr("mergekit_lab.stages.report.report_sweep", lambda jobs, *_: compared.append(jobs))
    begins([[f"run_dir={tmp_path}/run"]], 4)

    def launch(jobs, initial_job_idx: int) -> list[JobReturn]:
        begins(jobs[:1], initial_job_idx)
        raise RuntimeError("a process died")

    with pytest.raises(RuntimeError, match="a process died"):
        sweep(tmp_path, "stages=[merge]", "merger=average,task_arithmetic", launch=launch)
    assert [[job.name for job in jobs] for jobs in compared] == [["0", "1"]]


def test_a_trial_whose_process_dies_costs_a_search_no_other(tmp_path, monkeypatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr("mergekit_lab.stages.report.report_sweep", lambda *_: None)
    values = {"average": 0.25, "ties": 0.75}

    def launch(jobs, initial_job_idx: int) -> list[JobReturn]:
        mergers = [next(o.partition("=")[2] for o in job if o.startswith("merger=")) for job in jobs]
        if "task_arithmetic" in mergers:
            raise RuntimeError("a process died")
        found = begins(jobs, initial_job_idx)
        for each, merger in zip(found, mergers, strict=True):
            each.return_value = values[merger]
        return found

    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=12", "hydra.sweeper.n_jobs=6"]
    sweep(tmp_path, *search, "stages=[merge]", "merger=average,task_arithmetic,ties", launch=launch)
    found = OmegaConf.load(tmp_path / "run/optimization_results.yaml")
    assert (found.best_value, found.best_params.merger) == (0.75, "ties")
