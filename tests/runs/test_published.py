"""What of a run stands beside the numbers of papers, and what of it the papers print."""

from types import SimpleNamespace

import pytest
from composing import compose_config

from mergekit_lab.reporting import set_beside
from mergekit_lab.reporting.paper_tables import find_conditions
from mergekit_lab.runs import published
from mergekit_lab.runs.published import read_protocol
from mergekit_lab.runs.run import Run


@pytest.mark.parametrize("wall_seconds", [10.0, 999.0])
def test_the_seconds_of_a_training_are_those_of_its_steps(wall_seconds: float, monkeypatch) -> None:
    """Whatever loading, validation and writing took."""
    info = {"steps_per_second": 2.0, "wall_seconds": wall_seconds}
    run = SimpleNamespace(tasks=["a", "b"], need=lambda node: SimpleNamespace(info=info))
    monkeypatch.setattr(published, "declare_expert", lambda run, task: task)
    monkeypatch.setattr(published, "plan_settings", lambda run, task: SimpleNamespace(steps=20))
    measured = published._Measured(run, [])
    assert measured("training_seconds", "average") == measured("training_seconds", "a") == 10.0


def read_protocol_of(name: str, experiment: str, tmp_path, *overrides: str):
    cfg, choices = compose_config([f"+experiment={experiment}", f"store.root={tmp_path}", *overrides])
    return read_protocol(Run(cfg, tmp_path, choices), name)


def test_a_rows_page_tells_what_is_printed_from_what_is_ours(tmp_path) -> None:
    protocol = read_protocol_of("saft C3", "saft_tableC3", tmp_path, "optimizer=asam", "training.clip_norm=2.0")
    axes = {"backbone": "clip_vit_b32", "finetuning": "full", "optimizer": "asam"}
    tasks = find_conditions("saft C3")[0]
    rows = set_beside("saft C3", lambda *_: 70.0, axes, lambda when: True, tasks, protocol)
    ties = next(row for row in rows if row.row == "ties")
    for text in ("training.steps=8000", "optimizer.rho=0.5", "training.keep=best", "search.fields.density="):
        assert text in ties.equal
    assert "training.weight_decay=0.1" in ties.unprinted
    assert "training.clip_norm=2.0" in ties.unprinted  # the run's own value
    assert "mergers.ties.preset" in ties.unprinted
    assert "optimizer.scaling=saft" in ties.unprinted
    assert "mergers.ties" not in next(row for row in rows if row.row == "average").unprinted
    assert not {part.split("=")[0] for part in ties.equal.split("; ")} & set(ties.unprinted.split("; "))


def test_what_is_printed_for_language_models_is_ours_for_images(tmp_path) -> None:
    on_images = read_protocol_of("mergopt 9", "mergopt_table9", tmp_path, "optimizer=mergopt")
    on_texts = read_protocol_of("mergopt_trace 1", "llama32_1b_trace_mergopt", tmp_path)
    settings = {f"optimizer.{name}" for name in ("coefficients", "max_experts", "loc", "scale", "distribution")}
    assert settings <= set(on_images.ours)
    assert settings <= on_texts.printed


def test_a_source_without_protocols_prints_all_of_its_settings() -> None:
    axes = {"backbone": "clip_vit_b32", "finetuning": "full", "optimizer": "adamw"}
    name = "fusion_bench 8 tasks"
    rows = set_beside(name, lambda *_: 70.0, axes, lambda when: True, find_conditions(name)[0])
    assert {row.unprinted for row in rows} == {""}
    assert all("training.steps=2000" in row.equal for row in rows)
