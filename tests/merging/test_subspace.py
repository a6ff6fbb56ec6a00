"""Merges in a joint subspace: the authors' results, of adapters and of what they add; low rank stays low.

Cores merged by TIES depend on the adapters' own factors, so of dense experts they are not compared.
"""

import pytest
import torch
from merging.conftest import measure_error
from merging.world import make_world, run

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints.adapter_writing import LowRankChange, write_adapter
from mergekit_lab.merging import (
    DARE,
    TIES,
    TSVM,
    CoreSpace,
    Fisher,
    IsoC,
    KnOTS,
    LiNeS,
    Method,
    TaskArithmetic,
    merge_state_dicts,
)
from mergekit_lab.merging.adapter import AdapterMerge

NAMES = ("layers.0.q.weight", "layers.0.v.weight", "layers.1.q.weight")
CASES: dict[str, Method] = {
    "knots_authors_ties_20": KnOTS(preset="authors", inner=TIES(density=0.2, coefficient=0.6)),
    "knots_authors_ties_100": KnOTS(preset="authors", inner=TIES(density=1.0, coefficient=0.6)),
    "knots_paper_ties_50": KnOTS(inner=TIES(density=0.5, coefficient=0.6, preset="core_space")),
    "core_tsv": CoreSpace(inner=TSVM(coefficient=0.6)),
    "core_tv_iso": CoreSpace(inner=IsoC(coefficient=0.6)),
    "core_ties_30": CoreSpace(inner=TIES(density=0.3, coefficient=0.6, preset="core_space")),
}


@pytest.fixture(scope="module")
def adapters(golden, tmp_path_factory):
    """A base, four experts as adapters and dense, and the authors' results."""
    stored = golden.load_output("subspaces_T4")
    changes = [{n: LowRankChange(stored[f"{t}.{n}.b"], stored[f"{t}.{n}.a"]) for n in NAMES} for t in range(4)]
    base = {n: torch.zeros_like(c.b @ c.a) for n, c in changes[0].items()} | {"norm.weight": torch.ones(5)}
    opened = open_checkpoint(base, "base")
    experts = {}
    for t, change in enumerate(changes):
        folder = tmp_path_factory.mktemp(f"lora{t}")
        write_adapter(folder, change)
        experts[str(t)] = open_checkpoint(folder, str(t), base=opened)
    dense = {str(t): {n: c.b @ c.a for n, c in change.items()} for t, change in enumerate(changes)}
    return opened, experts, {t: base | state for t, state in dense.items()}, stored


@pytest.mark.parametrize("label", CASES)
def test_equals_the_original_implementation(adapters, label: str) -> None:
    base, experts, dense, stored = adapters
    ways: list[dict] = [{"experts": experts}]
    if label != "core_ties_30":
        ways.append({"experts": dense, "exclude": ["norm.weight"]})
    for way in ways:
        merged = merge_state_dicts(base, method=CASES[label], **way)
        for name in NAMES:
            assert measure_error(merged[name], stored[f"{label}.{name}"]) <= 1e-6, name
        assert torch.equal(merged["norm.weight"], base["norm.weight"])


@pytest.mark.parametrize("label", CASES)
def test_adapters_become_an_adapter_that_adds_the_merge(adapters, label: str) -> None:
    """Of rank 8 at most, which four adapters of rank 2 span: no rank is asked for, and nothing is lost."""
    base, experts, _, stored = adapters
    merge = AdapterMerge(base, experts, CASES[label])
    for name, change in merge.read_changes():
        assert measure_error(change.b @ change.a, stored[f"{label}.{name}"]) <= 1e-6, name
    assert merge.exact
    assert not merge.left_out
    assert set(merge.ranks) == set(NAMES)
    assert max(merge.ranks.values()) <= 8


@pytest.mark.parametrize("method", [KnOTS, CoreSpace])
def test_a_linear_inner_method_merges_the_same_in_any_basis(method: type[Method]) -> None:
    base, experts, fishers = make_world()
    plain = run(TaskArithmetic(weights=[0.3, 0.5, -1.0]), base, experts, fishers, dtype=torch.float64)
    inner = TaskArithmetic(weights=[0.3, 0.5, -1.0])
    merged = run(method(inner=inner, **LEFT_OUT.get(method, {})), base, experts, fishers, dtype=torch.float64)
    for name in base:
        assert measure_error(merged[name], plain[name]) <= 1e-6, name


LEFT_OUT = {KnOTS: {"tolerance": 0.0}}


def test_what_has_no_coordinates_is_refused() -> None:
    with pytest.raises(InputError, match=r"KnOTS.*Fisher"):
        KnOTS(inner=Fisher())
    for outer in (DARE, LiNeS):
        with pytest.raises(InputError, match=f"KnOTS .* inner .*{outer.__name__}"):
            outer(inner=KnOTS())
    with pytest.raises(InputError, match="preset is 'other'"):
        KnOTS(preset="other")
    with pytest.raises(InputError, match=r"tolerance is -1.*least 0"):
        KnOTS(tolerance=-1)
    with pytest.raises(InputError, match=r"rank is 0.*least 1"):
        CoreSpace(rank=0)
