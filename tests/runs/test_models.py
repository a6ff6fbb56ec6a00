from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import nn

from mergekit_lab.runs.models import Model


def test_a_model_of_several_tasks_is_loaded_once_unless_something_else_was_written() -> None:
    model, ones = nn.Linear(2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    run = SimpleNamespace(model=model, base_content={"name": "base"}, load_weights=model.load_state_dict)
    zero_shot = Model("zero_shot", ("a", "b"))

    with patch.object(Model, "read_state", return_value=ones) as read:
        assert zero_shot.load(run, "a") is zero_shot.load(run, "b") is model
        assert read.call_count == 1
        with torch.inference_mode():
            model.weight.mul_(3)
        assert torch.equal(zero_shot.load(run, "b").weight, ones["weight"])
        model.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
        assert torch.equal(zero_shot.load(run, "a").weight, ones["weight"])
        run.base_content = {"name": "another"}
        zero_shot.load(run, "a")
        assert read.call_count == 4
