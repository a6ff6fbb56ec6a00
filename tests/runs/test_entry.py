"""What a run tells its tracker: a run for every kind of work, and what was made of what."""

from pathlib import Path

import pytest
from composing import TINY, compose_config
from runs.recording import RecordingTracker

from mergekit_lab.programs import start


def track(folder: Path, store: Path, *overrides: str) -> list[tuple[str, dict]]:
    RecordingTracker.calls = []
    arguments = [
        *TINY,
        f"store.root={store}",
        "joint=false",
        "logger._target_=runs.recording.RecordingTracker",
        *overrides,
    ]
    cfg, choices = compose_config(arguments)
    start(cfg, folder, choices, arguments)
    return RecordingTracker.calls


@pytest.fixture(scope="module")
def tracked(session_store, tmp_path_factory) -> list[tuple[str, dict]]:
    return track(tmp_path_factory.mktemp("tracked") / "first", session_store, "merger=fisher")


def list_starts(events) -> list[dict]:
    return [event for name, event in events if name == "start"]


def test_every_kind_of_work_is_a_run_in_the_group_of_the_experiment(tracked) -> None:
    assert [s["job_type"] for s in list_starts(tracked)] == ["finetune", "curvature", "merge", "evaluate"]
    assert {s["group"] for s in list_starts(tracked)} == {"quickstart"}
    assert [name for name, _ in tracked if name != "product"] == ["start", "finish"] * 4
    assert list_starts(tracked)[0]["config"]["choices"]["merger"] == "fisher"


def test_lineage_goes_from_experts_by_fishers_and_the_merged_model_to_evaluations(tracked) -> None:
    inputs = {event["name"]: event["inputs"] for name, event in tracked if name == "product"}
    kinds = {event["name"]: event["kind"] for name, event in tracked if name == "product"}

    def list_of_kind(kind: str) -> list[str]:
        return [name for name in inputs if kinds[name] == kind]

    assert len(list_of_kind("experts")) == len(list_of_kind("fishers")) == 2
    assert all(inputs[expert] == () for expert in list_of_kind("experts"))
    assert sorted(i for fisher in list_of_kind("fishers") for i in inputs[fisher]) == sorted(
        list_of_kind("experts")
    )
    (merged,) = list_of_kind("merged")
    assert set(inputs[merged]) == {*list_of_kind("experts"), *list_of_kind("fishers")}
    assert [inputs[e] for e in list_of_kind("evaluations")].count((merged,)) == 2


def test_a_run_that_goes_on_elsewhere_has_the_same_identity(tracked, session_store, tmp_path) -> None:
    again = track(tmp_path / "b", session_store, "merger=fisher", "stage=[evaluate,report]", "progress=false")
    assert [s["identity"] for s in list_starts(again)] == [list_starts(tracked)[3]["identity"]]
    other = track(tmp_path / "c", session_store, "merger=fisher", "stage=evaluate", "evaluation_batch_size=7")
    assert list_starts(other)[0]["identity"] == list_starts(tracked)[3]["identity"]
    assert len({s["identity"] for s in list_starts(tracked)}) == 4
