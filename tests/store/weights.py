"""An artifact that tests of the store make."""

import torch
from safetensors.torch import save_file

from mergekit_lab.store import make_key

CONTENT = {"task": "digits", "training": {"lr": 1e-4, "steps": 9}, "seed": 0}
KEY = make_key(CONTENT)


def make_weights(fill: float = 1.0):
    def make(workspace):
        save_file({"w": torch.full((8, 8), fill)}, workspace.out / "model.safetensors")
        return {"val_accuracy": fill}

    return make
