"""Steps that are replayed are the steps that run as written."""

import logging
from dataclasses import replace

import pytest
import recorder
import torch
from trainings import OPTIMIZERS, SETTINGS, run

from mergekit_lab.training import captured

LONG = replace(SETTINGS, steps=24, keep="last", capture=True)
EAGER = replace(LONG, capture=False)


@pytest.fixture
def card(monkeypatch):
    """The CPU, with graphs."""
    monkeypatch.setattr(captured, "DEVICES", ("cpu",))
    monkeypatch.setattr("mergekit_lab.training.module.DEVICES", ("cpu",))
    monkeypatch.setattr(captured, "Card", recorder.Card)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorder.recording[0])
    return recorder.Card


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "mergopt_worst"])
def test_a_training_that_is_replayed_gives_what_one_that_runs_as_written_does(
    tmp_path, head, name, card
) -> None:
    eager = run(tmp_path / "eager", head, OPTIMIZERS[name], EAGER)
    replayed = run(tmp_path / "replayed", head, OPTIMIZERS[name], LONG)
    assert sum(graph.replays for graph in card.graphs) >= 12
    for key, value in eager.state.items():
        torch.testing.assert_close(replayed.state[key], value, rtol=2e-4, atol=2e-5)
    losses = [[p["train_loss"] for p in done.curve] for done in (eager, replayed)]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-5)
    rates = [[p["lr"] for p in done.curve] for done in (eager, replayed)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_one_it_is_made_of(tmp_path, head, caplog, monkeypatch) -> None:
    """50 steps with dropout, each loss within rounding; compiled code lies in the cache for the next one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    settings = replace(SETTINGS, steps=50, validations=1, keep="last")
    caplog.set_level(logging.INFO)
    plain = run(tmp_path / "plain", head, settings=settings)
    compiled = run(tmp_path / "one", head, settings=replace(settings, compile=True))
    said = [record.getMessage() for record in caplog.records if "compiled in" in record.getMessage()]
    assert len(said) == 1
    losses = [[p["train_loss"] for p in done.curve] for done in (plain, compiled)]
    assert len(losses[0]) == 50
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-5)
    assert any((tmp_path / "compiled").rglob("*.so"))
