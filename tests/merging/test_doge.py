"""DOGE-TA against the printed objective and torch's Adam, and what its largest entries are counted over."""

import torch
from merging.conftest import F64, draw, measure_error, merge_one
from torch import Tensor

from mergekit_lab.merging import DOGE, merge_state_dicts
from mergekit_lab.merging.doge import find_shared_directions, narrow_gaps, share_equally


def measure_gap(change: Tensor, deltas: Tensor, shares: Tensor) -> Tensor:
    """The objective as the paper prints it, for one matrix."""
    merged = (shares[:, None, None] * (deltas + change)).sum(dim=0)
    return (deltas * (deltas - merged)).sum(dim=-1).square().sum()


def test_doge_follows_torchs_adam_on_the_printed_objective_outside_the_shared_subspace() -> None:
    deltas = draw(2, 3, 6, 9)
    shares, basis = share_equally(deltas, 0.3), find_shared_directions(deltas, 2)
    changes = narrow_gaps(deltas, shares, basis, 25, 1e-2)
    for matrices, c, u, change in zip(deltas, shares, basis, changes, strict=True):
        free = torch.zeros(6, 9, dtype=F64, requires_grad=True)
        optimizer = torch.optim.Adam([free], lr=1e-2)
        for _ in range(25):
            optimizer.zero_grad()
            measure_gap(free, matrices, c).backward()
            free.grad -= u @ u.T @ free.grad
            optimizer.step()
        assert measure_error(change, free.detach()) < 1e-12
        assert measure_gap(change, matrices, c) < 0.99 * measure_gap(0 * change, matrices, c)


def test_doge_shares_the_directions_that_most_experts_have() -> None:
    left, right = torch.linalg.qr(draw(8, 8)).Q, torch.linalg.qr(draw(8, 8, seed=1)).Q
    common, *own = (left[:, [i]] @ right[[i]] for i in range(5))
    basis = find_shared_directions(torch.stack([3 * common + x for x in own])[None], 8)[0]
    assert basis.shape == (8, 1)
    assert abs(float(basis[:, 0] @ left[:, 0])) > 1 - 1e-12
    assert find_shared_directions(draw(1, 9, 8, 8), 2).shape == (1, 8, 0)


def test_doge_takes_nothing_from_an_expert_equal_to_the_base() -> None:
    deltas = draw(1, 3, 6, 9)
    more = torch.cat([deltas, 0 * deltas[:, :1]], dim=1)
    basis = find_shared_directions(deltas, 3)
    alone, beside = (narrow_gaps(x, share_equally(x, 0.3), basis, 20, 1e-2) for x in (deltas, more))
    assert measure_error(beside, alone) < 1e-12
    assert torch.equal(merge_one(DOGE(all_matrices=True), 0 * deltas[0]), torch.zeros(6, 9, dtype=F64))


def test_doge_counts_the_largest_entries_over_all_weights_that_it_merges() -> None:
    large, small = 2 + draw(3, 4, 4).abs(), draw(3, 4, 4, seed=1).clamp(-1, 1)
    other = 100 * draw(3, 4, 4, seed=2)
    tensors = {"fc1.weight": large, "fc2.weight": small, "embed.weight": other}
    base = {name: torch.zeros(4, 4, dtype=F64) for name in tensors}
    experts = [{name: value[t] for name, value in tensors.items()} for t in range(3)]
    merged = merge_state_dicts(base, experts, DOGE(density=0.45))
    assert not merged["fc2.weight"].any()
    assert not merged["embed.weight"].any()
    assert int((merged["fc1.weight"] != 0).sum()) > 1
    whole = merge_state_dicts(base, experts, DOGE(density=1.0))
    assert whole["fc2.weight"].all()
