"""Language models go on from where training was cut as if it had not been."""

from functools import partial

import pytest
import torch
from language import Colors, save_tiny, tiny_backbone

from mergekit_lab.backbones import LoRA
from mergekit_lab.optim import MergOPT
from mergekit_lab.training import TrainingSettings, finetune

SETTINGS = TrainingSettings(steps=8, batch_size=4, lr=1e-2, weight_decay=0.1, validations=4, keep="last")
CASES = {
    "llama": {"packing": True, "group_by_length": False},
    "qwen2": {"checkpointing": True, "answering": "generate"},
    "t5": {},
}


class Cut(Exception):
    pass


@pytest.mark.parametrize(("kind", "lora"), [("llama", True), ("qwen2", False), ("t5", False)])
def test_a_cut_training_resumed_equals_the_uninterrupted_one_bit_for_bit(kind, lora, tmp_path) -> None:
    """Batches of like lengths or packed rows, dropout, recomputed activations, adapters: none has a state."""
    folder = save_tiny(tmp_path / "model", kind)

    def run(name, on_metrics=None):
        backbone = tiny_backbone(folder, kind, **CASES[kind])
        model = backbone.model()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        model = LoRA(rank=2).make_trainable(model, seed=0) if lora else model
        optimizer = partial(MergOPT, base=partial(torch.optim.AdamW, lr=1e-2), scale=1e-3)
        return finetune(
            model, {"colors": backbone.objective(Colors(size=10))}, optimizer, SETTINGS, seed=3,
            resume=tmp_path / name, trainer={"accelerator": "cpu", "enable_progress_bar": False},
            on_metrics=on_metrics,
        )  # fmt: skip

    def cut(metrics, step) -> None:
        if step == 5:
            raise Cut

    whole = run("whole")
    with pytest.raises(Cut):
        run("cut", cut)
    steps = []
    resumed = run("cut", lambda metrics, step: steps.append(step))
    assert min(steps) == 5
    for name, value in whole.state.items():
        assert torch.equal(resumed.state[name], value), name
    assert resumed.curve == whole.curve
