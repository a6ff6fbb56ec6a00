"""The dashboard is a definition of wandb_workspaces: what it would save is looked at, nothing is sent."""

import json

import pytest

from mergekit_lab import InputError
from mergekit_lab.reporting.wandb_dashboard import build_dashboard


@pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")  # in wandb_workspaces itself
def test_the_dashboard_shows_what_the_tracker_logs() -> None:
    pytest.importorskip("wandb_workspaces")
    dashboard = build_dashboard("p", "team", ["quickstart"])
    saved = json.dumps(dashboard._to_model().spec.model_dump(mode="json", by_alias=True, exclude_none=True))
    for name in (
        "best/normalized",
        "best/seconds",
        "leaderboard",
        "train_loss",
        "quickstart",
        "evaluate",
        "hessian",
    ):
        assert name in saved
    assert (dashboard.project, dashboard.entity) == ("p", "team")


def test_without_the_library_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(InputError, match=r"'mergekit_lab\[dashboard\]'"):
        build_dashboard("p", "team")
