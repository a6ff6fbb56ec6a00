"""Steps that are replayed are the steps that run as written, and a compiled model is the one it is made of."""

import logging
from dataclasses import replace

import pytest
import recorder
import torch
from tiny import TinyEncoder, make_tiny_objective
from torch.nn import functional
from trainings import OPTIMIZERS, SETTINGS, Cut, cut_at, run

from mergekit_lab.optim.capturable import keep_on_device
from mergekit_lab.optim.wrapper import WrappedOptimizer
from mergekit_lab.training import captured

CPU = torch.device("cpu")
REPLAYABLE = [name for name in OPTIMIZERS if name != "mergopt_worst"]


@pytest.fixture
def card(monkeypatch):
    """The CPU, with graphs."""
    monkeypatch.setattr("mergekit_lab.training.module.DEVICES", ("cpu",))
    monkeypatch.setattr(captured, "GraphStream", recorder.RecordedGraphStream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorder.recording[0])
    return recorder.RecordedGraphStream


def train(make_optimizer, head, replays: bool, steps: int = 14):
    """Weights after steps with dropout, a rate that changes, and batches of two sizes."""
    model = TinyEncoder()
    optimizer = make_optimizer(list(model.named_parameters()))
    if isinstance(optimizer, WrappedOptimizer):
        optimizer.stays_in_train_mode = False
        optimizer.allow_replay(CPU)
    keep_on_device(getattr(optimizer, "base", optimizer), CPU)
    objective = make_tiny_objective(head)

    def step(batch):
        first = []

        def closure():
            images, labels = batch["task"]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images) @ head.T, labels)
            loss.backward()
            first.append(loss.detach())
            return loss

        optimizer.step(closure)
        return first[0]

    make = captured.Replay(step, optimizer, CPU) if replays else step
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        optimizer.param_groups[0]["lr"].fill_(0.01 / (1 + number))
        size = 4 if number % 5 == 4 else 8
        index = torch.arange(number, number + size)
        losses.append(float(make({"task": objective.make_training_batch(index)})))
    return losses, model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("name", REPLAYABLE)
def test_what_is_replayed_is_what_runs_as_written_bit_for_bit(name, head, card) -> None:
    losses, weights, state = train(OPTIMIZERS[name], head, replays=True)
    assert sum(graph.replays for graph in card.graphs) >= 5
    expected_losses, expected_weights, expected_state = train(OPTIMIZERS[name], head, replays=False)
    assert losses == expected_losses
    for key, value in expected_weights.items():
        assert torch.equal(weights[key], value), key
    own = {key: value for key, value in state.get("wrapper", {}).items() if not isinstance(value, dict)}
    assert own == {k: v for k, v in expected_state.get("wrapper", {}).items() if not isinstance(v, dict)}


def test_a_replayed_training_that_was_cut_equals_one_that_was_not_bit_for_bit(tmp_path, head, card) -> None:
    settings = replace(SETTINGS, keep="last", capture=True)

    whole = run(tmp_path / "whole", head, OPTIMIZERS["mergopt"], settings)
    assert sum(graph.replays for graph in card.graphs) >= 8
    with pytest.raises(Cut):
        run(tmp_path / "cut", head, OPTIMIZERS["mergopt"], settings, on_metrics=cut_at(8))
    saved = torch.load(tmp_path / "cut/last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"][0]
    assert isinstance(saved["lr"], float)
    assert not saved["capturable"]
    resumed = run(tmp_path / "cut", head, OPTIMIZERS["mergopt"], settings)
    for key, value in whole.state.items():
        assert torch.equal(resumed.state[key], value), key
    assert resumed.curve == whole.curve
    written = run(tmp_path / "written", head, OPTIMIZERS["mergopt"], replace(settings, capture=False))
    losses = [[p["train_loss"] for p in done.curve] for done in (whole, written)]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mergopt_worst", "MergOPT decides on the"),
        ("old", "Adagrad reads the host"),
    ],
)
def test_what_cannot_be_replayed_says_why_and_runs_as_written(tmp_path, head, card, caplog, name, why) -> None:
    caplog.set_level(logging.INFO)
    old = lambda named: torch.optim.Adagrad([p for _, p in named], lr=1e-2, foreach=True)  # noqa: E731
    run(tmp_path, head, OPTIMIZERS.get(name, old), replace(SETTINGS, capture=True))
    assert [m for m in caplog.messages if m.startswith("training.capture: ") and why in m]


def test_a_step_that_fails_to_be_recorded_runs_as_written(head, card, caplog) -> None:
    """What waits for the device cannot be recorded; the step is made once all the same."""
    model = TinyEncoder()
    optimizer = OPTIMIZERS["mergopt"](list(model.named_parameters()))
    optimizer.allow_replay(CPU)
    keep_on_device(optimizer.base, CPU)

    def step(batch):
        def closure():
            loss = model(batch["task"][0]).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        float(loss)
        return loss

    replay = captured.Replay(step, optimizer, CPU)
    batch = {"task": make_tiny_objective(head).make_training_batch(torch.arange(8))}
    for _ in range(4):
        replay(batch)
    assert optimizer.steps_done == 4
    assert [m for m in caplog.messages if "cannot be recorded" in m and "waits for the device" in m]


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_one_it_is_made_of(tmp_path, head, caplog, monkeypatch) -> None:
    """50 steps with dropout, each loss within rounding; compiled code lies in the cache for the next one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    # Else a dozen programs are compiled to try vectors out.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    settings = replace(SETTINGS, steps=50, validations=1, keep="last")
    caplog.set_level(logging.INFO)
    plain = run(tmp_path / "plain", head, settings=settings)
    compiled = run(tmp_path / "one", head, settings=replace(settings, compile=True))
    assert len([message for message in caplog.messages if message.startswith("compiled in")]) == 1
    losses = [[p["train_loss"] for p in done.curve] for done in (plain, compiled)]
    assert len(losses[0]) == 50
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-5)
    assert any((tmp_path / "compiled").rglob("*.so"))
