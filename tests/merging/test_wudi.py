"""WUDI against the paper's objective and torch's Adam, and the weights it takes for its own."""

import pytest
import torch
from merging.conftest import F64, draw, measure_error, merge_one
from torch import Tensor

from mergekit_lab import InputError
from mergekit_lab.merging import WUDI
from mergekit_lab.merging.wudi import minimize_interference


def compute_interference(merged: Tensor, deltas: Tensor) -> Tensor:
    """The objective as the paper prints it, for one matrix."""
    products = (merged - deltas) @ deltas.mT
    return (products.square().sum(dim=(1, 2)) / deltas.square().sum(dim=(1, 2))).sum()


def test_wudi_follows_torchs_adam_on_the_printed_objective() -> None:
    deltas = draw(2, 3, 6, 9)
    for matrices, change in zip(deltas, minimize_interference(deltas, 25, 1e-3), strict=True):
        merged = matrices.sum(dim=0).requires_grad_()
        optimizer = torch.optim.Adam([merged], lr=1e-3)
        for _ in range(25):
            optimizer.zero_grad()
            compute_interference(merged, matrices).backward()
            optimizer.step()
        assert measure_error(change, merged.detach()) < 1e-12


def test_wudi_lowers_the_interference_and_without_steps_is_the_sum() -> None:
    deltas = draw(4, 6, 9)
    before = merge_one(WUDI(all_matrices=True, steps=0), deltas)
    assert measure_error(before, deltas.sum(dim=0)) < 1e-12
    after = merge_one(WUDI(all_matrices=True, lr=1e-3), deltas)
    assert compute_interference(after, deltas) < 0.8 * compute_interference(before, deltas)


def test_wudi_takes_nothing_from_an_expert_equal_to_the_base() -> None:
    deltas = draw(3, 6, 9)
    method = WUDI(all_matrices=True, lr=1e-3, steps=20)
    assert (
        measure_error(merge_one(method, torch.cat([deltas, 0 * deltas[:1]])), merge_one(method, deltas)) < 1e-12
    )
    assert torch.equal(merge_one(method, 0 * deltas), torch.zeros(6, 9, dtype=F64))


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("visual.transformer.resblocks.0.attn.in_proj_weight", True),
        ("visual.transformer.resblocks.0.attn.out_proj.weight", True),
        ("transformer.resblocks.11.mlp.c_fc.weight", True),
        ("transformer.resblocks.11.mlp.c_proj.weight", True),
        ("vision_model.encoder.layers.3.self_attn.q_proj.weight", True),
        ("vision_model.encoder.layers.3.self_attn.out_proj.weight", True),
        ("vision_model.encoder.layers.3.mlp.fc2.weight", True),
        ("model.layers.0.self_attn.o_proj.weight", True),
        ("model.layers.0.mlp.gate_proj.weight", True),
        ("model.layers.0.mlp.down_proj.weight", True),
        ("encoder.layer.0.attention.self.query.weight", True),
        ("encoder.layer.0.attention.output.dense.weight", True),
        ("encoder.layer.0.intermediate.dense.weight", True),
        ("layers.0.gate_up_proj.weight", True),
        ("layers.0.experts.0.w3.weight", True),
        ("layers.0.attn.c_attn.weight", True),
        ("pooler.dense.weight", False),
        ("visual.proj", False),
        ("token_embedding.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("visual_projection.weight", False),
        ("visual.transformer.resblocks.0.ln_1.weight", False),
    ],
)
def test_wudi_knows_attention_and_mlp_weights_by_name(name: str, taken: bool) -> None:
    assert WUDI().is_matrix(name, (4, 4)) == taken
    assert WUDI(all_matrices=True).is_matrix(name, (4, 4))
    assert not WUDI().is_matrix(name, (4,))


def test_wudi_refuses_a_model_in_which_it_knows_no_name() -> None:
    with pytest.raises(InputError, match="set all_matrices=True"):
        merge_one(WUDI(), draw(2, 3, 4))


def test_wudi_leaves_experts_that_do_not_interfere() -> None:
    deltas = torch.block_diag(draw(3, 4), draw(5, 6, seed=1)).float()
    parts = torch.stack([deltas, deltas])
    parts[0, 3:], parts[1, :3] = 0, 0
    assert torch.equal(merge_one(WUDI(all_matrices=True, lr=1e-2), parts), deltas)
