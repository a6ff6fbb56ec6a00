"""A small model with experts and side inputs for every method, and what is asked of merges of it."""

import torch
from merging.conftest import measure_error, to_dtype
from torch import Tensor

from mergekit_lab.merging import Method, merge_state_dicts


def make_world(experts: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A base, named experts and Fishers: matrices, a kernel, vectors, a scalar, a buffer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shapes = {
        "a.weight": (12, 7),
        "b.weight": (9, 16),
        "conv.weight": (4, 3, 2, 2),
        "a.bias": (12,),
        "scale": (),
        "attn.out_proj.weight": (8, 8),
    }
    base = {n: draw(*s) for n, s in shapes.items()} | {"position_ids": torch.arange(5)}
    people = {
        f"task_{t}": {n: v + 0.1 * draw(*v.shape) if v.is_floating_point() else v for n, v in base.items()}
        for t in range(experts)
    }
    fishers = {name: {n: draw(*s).square() for n, s in shapes.items()} for name in people}
    return to_dtype(base, dtype), {n: to_dtype(e, dtype) for n, e in people.items()}, fishers


def run(method: Method, base, experts, fishers, **options) -> dict[str, Tensor]:
    by_expert = {name: make_grams(name) for name in experts}
    masks = {name: {n: (v > 0.3).to(v) for n, v in fisher.items()} for name, fisher in fishers.items()}
    available = {"fisher": fishers, "gram": by_expert, "chained_gram": by_expert, "mask": masks}
    statistics = {
        side_input: {n: available[side_input][n] for n in experts} for side_input in method.side_inputs
    }
    return merge_state_dicts(base, experts, method, statistics=statistics, **options)


def make_grams(expert: str) -> dict[str, Tensor]:
    """Input Grams of the world's linear modules, a function of the expert's name."""
    generator = torch.Generator().manual_seed(sum(expert.encode()))
    inputs = {n: torch.randn(40, size, generator=generator) for n, size in (("a", 7), ("b", 16))}
    return {n: x.T @ x for n, x in inputs.items()}


def assert_close(merged: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert merged.keys() == wanted.keys()
    for name in wanted:
        assert merged[name].dtype == wanted[name].dtype, name
        assert measure_error(merged[name], wanted[name]) <= tolerance, name


def assert_equal(merged: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(merged) == list(wanted)
    for name in wanted:
        assert torch.equal(merged[name], wanted[name]), name
