"""Weights that a library stores as [in, out] merge as those it stores as [out, in]."""

import pytest
import torch
from merging.conftest import draw, measure_error
from torch import Tensor

from mergekit_lab.merging import (
    CAT,
    DOGE,
    TIES,
    WUDI,
    Breadcrumbs,
    CoreSpace,
    IsoCTS,
    KnOTS,
    Method,
    ModelStock,
    RegMean,
    WeightAverage,
    merge_state_dicts,
)
from mergekit_lab.merging.inputs import open_inputs


def make_conv1d_block(seed: int) -> dict[str, Tensor]:
    """Weights and biases as a GPT-2 block stores them, and an embedding."""
    sizes = {"attn.c_attn": (4, 12), "attn.c_proj": (4, 4), "mlp.c_fc": (4, 16), "mlp.c_proj": (16, 4)}
    weights = {f"h.{name}.weight": draw(*size, seed=seed) for name, size in sizes.items()}
    biases = {f"h.{name}.bias": draw(size[1], seed=seed) for name, size in sizes.items()}
    return {"wte.weight": draw(4, 4, seed=seed), **weights, **biases}


def as_linear(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: v.mT if n.startswith("h.") and v.dim() == 2 else v for n, v in state.items()}


@pytest.mark.parametrize(
    "method",
    [
        WUDI(lr=1e-2, steps=5),
        DOGE(steps=5),
        IsoCTS(common=0.4),
        RegMean(),
        CAT(penalty=0.1),
        KnOTS(inner=TIES(density=0.3)),
        CoreSpace(),
        ModelStock(filter_wise=True),
        Breadcrumbs(density=1.0, inner=IsoCTS(common=0.4)),
    ],
    ids=repr,
)
def test_how_a_weight_is_stored_does_not_matter(method: Method) -> None:
    base, *experts = (make_conv1d_block(seed) for seed in range(4))
    inputs = {n.removesuffix(".weight"): len(v) for n, v in base.items() if n.endswith(".weight")}
    rows = [{name: draw(20, size, seed=seed) for name, size in inputs.items()} for seed in range(3)]
    grams = [{name: x.mT @ x for name, x in of_expert.items()} for of_expert in rows]
    statistics = {"gram": grams} if method.side_inputs else {}
    merged = merge_state_dicts(base, experts, method, statistics=statistics)
    wanted = merge_state_dicts(as_linear(base), list(map(as_linear, experts)), method, statistics=statistics)
    for name, value in as_linear(merged).items():
        assert measure_error(value, wanted[name]) < 1e-12, name
    assert not torch.equal(merged["h.attn.c_attn.weight"], base["h.attn.c_attn.weight"])


def test_the_layout_of_square_weights_is_that_of_their_kind() -> None:
    def list_transposed(state: dict[str, Tensor]) -> frozenset[str]:
        return open_inputs(state, [state], WeightAverage()).transposed

    block = make_conv1d_block(0)
    assert list_transposed(block) == {n for n in block if n.startswith("h.") and n.endswith(".weight")}
    assert not list_transposed(as_linear(block))
    assert not list_transposed({"norm.weight": draw(3, 4), "norm.bias": draw(3, 4)})
