"""What jobs share and cannot be made is tried once in a sweep, and named by every job that needs it."""

import json
from pathlib import Path

import pytest
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from stages.conftest import TINY

from mergekit_lab.__main__ import main
from mergekit_lab.paths import conf_dir

BAD = "1e30"
"""A learning rate after which no loss is finite."""


class Elsewhere:
    """A launcher that is not Hydra's own, as which the sweeper would not train first."""

    def __init__(self, launch) -> None:
        self.launch = launch


def sweep(folder: Path, *arguments: str) -> None:
    sweeper, fixed = sweeper_of(folder)
    sweeper.sweep([*fixed, *arguments])


def sweeper_of(folder: Path):
    """The sweeper of a small run, with a launcher that is not Hydra's; and what its jobs have in common."""
    GlobalHydra.instance().clear()
    hydra = Hydra.create_main_hydra2("main", create_config_search_path(str(conf_dir())))
    fixed = [*TINY, "~suite.tasks.latin", "joint=false", f"store.root={folder}/store", f"run_dir={folder}/run"]
    sweeper = Plugins.instance().instantiate_sweeper(
        hydra_context=HydraContext(hydra.config_loader, Callbacks()),
        task_function=main.__wrapped__,
        config=hydra.compose_config("main", fixed, RunMode.MULTIRUN),
    )
    sweeper.launcher = Elsewhere(sweeper.launcher.launch)
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
