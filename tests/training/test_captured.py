"""Steps that are replayed are the steps that run as written."""

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
