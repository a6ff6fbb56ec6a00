"""What a training cost is measured where there is enough of it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tiny import TinyEncoder, make_tiny_objective

from mergekit_lab.training import TrainingCost, TrainingSettings, clock, finetune


@pytest.mark.parametrize(("steps", "known"), [(4, False), (12, True)])
def test_steps_a_second_are_known_after_the_first_five(steps: int, known: bool, tmp_path) -> None:
    cost = TrainingCost()
    finetune(
        TinyEncoder(),
        {"tiny": make_tiny_objective(torch.randn(3, 8))},
        partial(torch.optim.SGD, lr=0.1),
        TrainingSettings(steps=steps, batch_size=6, lr=0.1, weight_decay=0.0, validations=2),
        seed=0,
        resume=tmp_path,
        callbacks=[cost],
        trainer={"accelerator": "cpu", "devices": 1, "enable_progress_bar": False},
    )
    assert ("steps_per_second" in cost.measured) == known
    assert cost.measured.get("steps_per_second", 1.0) > 0
    assert "gigabytes" not in cost.measured


def test_validation_and_what_is_written_after_it_do_not_count(tmp_path, monkeypatch) -> None:
    times = iter(range(100))
    monkeypatch.setattr(clock.time, "monotonic", lambda: float(next(times)))
    cost = TrainingCost()
    cpu = torch.device("cpu")
    trainer, module = SimpleNamespace(strategy=SimpleNamespace(root_device=cpu)), SimpleNamespace(device=cpu)
    for _ in range(7):
        cost.on_train_batch_start(trainer)
        cost.on_train_batch_end(trainer)
    cost.on_validation_start(trainer)
    next(times)  # validation, checkpoints
    for _ in range(3):
        cost.on_train_batch_start(trainer)
        cost.on_train_batch_end(trainer)
    cost.on_train_end(trainer, module)
    assert cost.measured == {"steps_per_second": 5 / 2}
