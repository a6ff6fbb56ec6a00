"""What originals were given and what they made of it; `experiments/originals` wrote it."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parent / "data" / "golden"


class Golden:
    """The stored inputs of the golden vectors, and the stored outputs by name."""

    def __init__(self) -> None:
        self.base = load_file(GOLDEN / "inputs/base.safetensors")
        self.experts = [load_file(GOLDEN / f"inputs/expert_{t}.safetensors") for t in range(4)]
        self.fishers = [load_file(GOLDEN / f"inputs/fisher_{t}.safetensors") for t in range(4)]
        self.grams = [load_file(GOLDEN / f"inputs/regmean_gram_{t}.safetensors") for t in range(4)]

    def load_output(self, name: str) -> dict[str, Tensor]:
        return load_file(GOLDEN / f"outputs/{name}.safetensors")


def select_part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
