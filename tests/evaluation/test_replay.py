"""Forward passes that are replayed give what the model gives, whatever weights it has by then."""

import pytest
import recorder
import torch
from tiny import make_tiny_objective

from mergekit_lab.evaluation import replay, score


@pytest.fixture
def card(monkeypatch):
    """The CPU, with graphs."""
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    monkeypatch.setattr(replay, "GraphStream", recorder.RecordedGraphStream)
    monkeypatch.setattr(replay, "_KNOWN", type(replay._KNOWN)())
    return recorder.RecordedGraphStream


def test_one_recording_a_shape_serves_every_candidate(encoder, head, card) -> None:
    objective = make_tiny_objective(head, other_size=50)
    for step in range(4):
        with torch.no_grad():
            encoder.body[1].weight += 0.3 * torch.randn(16, 48, generator=torch.Generator().manual_seed(step))
        replayed = score(encoder, objective, "validation", batch_size=20, with_loss=True)
        objective.replays_forward = False
        written = score(encoder, objective, "validation", batch_size=20, with_loss=True)
        del objective.replays_forward
        assert (replayed.predictions, replayed.loss) == (written.predictions, written.loss)
    assert len(card.graphs) == 2
    assert sum(graph.replays for graph in card.graphs) >= 7


def test_weights_that_were_moved_void_what_was_recorded(encoder, head, card) -> None:
    objective = make_tiny_objective(head, other_size=40)
    score(encoder, objective, "validation", batch_size=20)
    encoder.body[1].weight.data = -encoder.body[1].weight.data
    scores = score(encoder, objective, "validation", batch_size=20)
    encoder.eval()
    images = objective.task.load_samples("validation").images
    assert scores.predictions == (encoder(images) @ head.T).argmax(-1).tolist()


def test_a_pass_that_cannot_be_recorded_runs_as_written(encoder, head, card, caplog) -> None:
    plain = type(encoder).forward

    class Asking(type(encoder)):
        def forward(self, images):
            assert len(images.nonzero())
            return plain(self, images)

    encoder.__class__ = Asking
    objective = make_tiny_objective(head, other_size=60)
    with caplog.at_level("INFO", "mergekit_lab"):
        scores = score(encoder, objective, "validation", batch_size=20)
    assert len(scores.predictions) == 60
    assert caplog.text.count("evaluation runs as written") == 1


def test_a_model_that_is_watched_runs_as_written(encoder, card) -> None:
    encoder.eval()
    watch = encoder.body[1].register_forward_hook(lambda *_: None)
    assert replay.replay_forward(encoder) is encoder
    watch.remove()
    assert replay.replay_forward(encoder) is not encoder
