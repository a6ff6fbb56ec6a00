"""Language models go on from where training was cut as if it had not been."""

from functools import partial

import pytest
import torch
from language import Colors, make_tiny_backbone, save_tiny
from trainings import Cut, cut_at

from mergekit_lab.backbones import LoRA
from mergekit_lab.backbones.rows import round_up
from mergekit_lab.optim import MergOPT
from mergekit_lab.training import TrainingSettings, finetune

SETTINGS = TrainingSettings(steps=8, batch_size=4, lr=1e-2, weight_decay=0.1, validations=4, keep="last")
CASES = {
    "llama": {"packing": True, "group_by_length": False},
    "qwen2": {"checkpointing": True, "answering": "generate"},
    "t5": {},
}


@pytest.mark.parametrize(("architecture", "lora"), [("llama", True), ("qwen2", False), ("t5", False)])
def test_a_cut_training_resumed_equals_the_uninterrupted_one_bit_for_bit(architecture, lora, tmp_path) -> None:
    """Batches of like lengths or packed rows, dropout, recomputed activations, adapters: none has a state."""
    folder = save_tiny(tmp_path / "model", architecture)

    def run(name, on_metrics=None):
        backbone = make_tiny_backbone(folder, architecture, **CASES[architecture])
        model = backbone.make_model()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        model = LoRA(rank=2).make_trainable(model, seed=0) if lora else model
        optimizer = partial(MergOPT, base=partial(torch.optim.AdamW, lr=1e-2), scale=1e-3)
        return finetune(
            model, {"colors": backbone.make_objective(Colors(size=10))}, optimizer, SETTINGS, seed=3,
            resume=tmp_path / name, trainer={"accelerator": "cpu", "enable_progress_bar": False},
            on_metrics=on_metrics,
        )  # fmt: skip

    whole = run("whole")
    with pytest.raises(Cut):
        run("cut", cut_at(5))
    steps = []
    resumed = run("cut", lambda metrics, step: steps.append(step))
    assert min(steps) == 5
    for name, value in whole.state.items():
        assert torch.equal(resumed.state[name], value), name
    assert resumed.curve == whole.curve


def test_rows_of_a_few_lengths_have_the_loss_and_gradient_of_rows_as_they_are(tmp_path) -> None:
    backbone = make_tiny_backbone(save_tiny(tmp_path, "llama"), "llama")
    model, objective = backbone.make_model(), backbone.make_objective(Colors(size=10))
    shapes, lengths = set(), set()
    for index in (torch.tensor([0, 1, 2]), torch.tensor([7]), torch.tensor([3, 9])):
        batch = objective.make_training_batch(index)
        fixed = objective.fix_shape(batch)
        lengths.add(batch["input_ids"].shape[1])
        shapes.add((fixed["input_ids"].shape[1], fixed["columns"].shape[1]))
        assert objective.count_items(fixed) == objective.count_items(batch)
        results = []
        for each in (batch, fixed):
            loss = objective.compute_loss(model, each)
            results.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert {16, 24, 32, 48, 64, 96}.issuperset(number for shape in shapes for number in shape)
    assert {shape[0] for shape in shapes} == {round_up(length) for length in lengths}
    tokens, entries = objective.padded
    assert 0.5 < tokens / entries < 1
