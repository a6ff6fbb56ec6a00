"""TSV-M, EpiMer and the isotropic merges: the limit cases they state, and stacks of matrices."""

import pytest
import torch
from merging.conftest import F64, draw, measure_error, merge_one
from merging.world import assert_close, assert_equal, make_world, run

from mergekit_lab.merging import DOGE, TSVM, WUDI, EpiMer, IsoC, IsoCTS, Method
from mergekit_lab.merging.contract import Site
from mergekit_lab.merging.iso import split_directions
from mergekit_lab.merging.spectral import SpectralMethod


def test_a_large_eps_makes_epimer_tsvm() -> None:
    base, experts, fishers = make_world(dtype=torch.float64)
    assert_close(
        run(EpiMer(rank=2, floor=1e12), base, experts, fishers), run(TSVM(rank=2), base, experts, {}), 1e-9
    )


def test_scaling_all_curvatures_and_eps_together_changes_nothing() -> None:
    base, experts, fishers = make_world(dtype=torch.float64)
    scaled = {name: {n: 1024 * v for n, v in f.items()} for name, f in fishers.items()}
    assert_close(
        run(EpiMer(rank=2, floor=1024e-8), base, experts, scaled),
        run(EpiMer(rank=2), base, experts, fishers),
        1e-9,
    )


def test_the_scale_of_one_tasks_fisher_matters_unless_normalized() -> None:
    base, experts, fishers = make_world(dtype=torch.float64)
    louder = fishers | {"task_0": {n: 100 * v for n, v in fishers["task_0"].items()}}
    for normalize in ("trace", "norm"):
        method = EpiMer(rank=2, floor=1e-12, normalize=normalize)
        assert_close(run(method, base, experts, louder), run(method, base, experts, fishers), 1e-6)
    plain = EpiMer(rank=2)
    with pytest.raises(AssertionError):
        assert_close(run(plain, base, experts, louder), run(plain, base, experts, fishers), 1e-3)


def test_one_expert_of_epimer_is_its_low_rank_truncation() -> None:
    base, experts, fishers = make_world(experts=1, dtype=torch.float64)
    merged = run(EpiMer(rank=3, coefficient=0.5), base, experts, fishers)
    u, s, vh = torch.linalg.svd(experts["task_0"]["b.weight"] - base["b.weight"], full_matrices=False)
    assert measure_error(merged["b.weight"] - base["b.weight"], 0.5 * (u[:, :3] * s[:3]) @ vh[:3]) < 1e-10


def test_eta_is_never_negative_and_vanishes_at_equal_curvature() -> None:
    base, experts, fishers = make_world(dtype=torch.float64)
    notes: dict = {}
    run(EpiMer(rank=2), base, experts, fishers, notes=notes)
    gains = [note["eta"] for note in notes.values()]
    assert len(gains) == 3
    assert min(gains) > 0
    same = dict.fromkeys(experts, fishers["task_0"])
    run(EpiMer(rank=2), base, experts, same, notes=notes)
    assert max(abs(note["eta"]) for note in notes.values()) < 1e-12


def test_more_experts_than_directions_leaves_the_matrix_at_the_base_and_says_so() -> None:
    base, experts, fishers = make_world(experts=8)
    notes: dict = {}
    merged = run(TSVM(), base, experts, fishers, notes=notes)
    assert torch.equal(merged["a.weight"], base["a.weight"])
    assert "the matrix has directions" in notes["a.weight"]["rank"]


def test_an_expert_equal_to_the_base_and_equal_experts_keep_the_spectral_methods_finite() -> None:
    base, experts, fishers = make_world()
    notes: dict = {}
    twins = {"task_0": base, "task_1": experts["task_1"], "task_2": experts["task_1"]}
    for method in (TSVM(), EpiMer(rank=2)):
        merged = run(method, base, twins, fishers, notes=notes)
        assert all(bool(torch.isfinite(v).all()) for v in merged.values())
        assert notes["b.weight"]["rank_deficient"]["u"] < notes["b.weight"]["rank_deficient"]["atoms"]
    nothing = dict.fromkeys(experts, base)
    assert_equal(run(TSVM(), base, nothing, fishers), base)


def test_iso_c_gives_every_direction_the_mean_singular_value() -> None:
    deltas = draw(3, 5, 8)
    u, s, vh = torch.linalg.svd(deltas.sum(dim=0), full_matrices=False)
    merged = merge_one(IsoC(), deltas)
    assert measure_error(merged, s.mean() * u @ vh) < 1e-12
    assert measure_error(torch.linalg.svdvals(merged), s.mean().expand(5)) < 1e-12


def test_iso_cts_with_common_directions_only_is_iso_c() -> None:
    deltas = draw(3, 5, 8)
    assert measure_error(merge_one(IsoCTS(common=1.0), deltas), merge_one(IsoC(), deltas)) < 1e-12
    assert measure_error(merge_one(IsoCTS(common=0.4), deltas), merge_one(IsoC(), deltas)) > 1e-2


@pytest.mark.parametrize(
    ("r", "experts", "common", "own", "shared"),
    [
        (32, 4, 0.8, 2, 24),
        (3, 4, 0.8, 0, 3),
        (10, 4, 0.8, 0, 10),  # 2/4 rounds to even
        (30, 4, 0.8, 2, 22),  # 6/4 rounds to even
        (768, 8, 0.8, 19, 616),
        (5, 3, 0.0, 1, 2),  # 5/3 would round to 6 of 5 directions
    ],
)
def test_iso_cts_rounds_directions_as_the_original(r, experts, common, own, shared) -> None:
    assert split_directions(r, experts, common) == (own, shared)


@pytest.mark.parametrize("method", [IsoC(), IsoCTS(), IsoCTS(common=0.4)], ids=repr)
def test_iso_leaves_directions_that_no_expert_has(method: Method) -> None:
    deltas = draw(3, 6, 2) @ draw(3, 2, 9, seed=1)
    deltas[2] = 0
    notes: dict = {}
    merged = merge_one(method, deltas, notes=notes)
    values = torch.linalg.svdvals(merged)
    assert len(notes["w"].keys() & {"rank", "rank_deficient"}) == 1
    if isinstance(method, IsoC):
        assert measure_error(values[:4], values[0].expand(4)) < 1e-10
    assert float(values[4]) < 1e-12 * float(values[0])
    assert torch.equal(merge_one(method, 0 * deltas), torch.zeros(6, 9, dtype=F64))


@pytest.mark.parametrize("method", [WUDI(lr=1e-3), TSVM(), IsoC(), IsoCTS(common=0.4), DOGE(steps=9)], ids=repr)
def test_a_stack_of_matrices_merges_as_each_does_alone(method: SpectralMethod) -> None:
    """Also where the experts weigh differently from tensor to tensor."""
    deltas, weights = draw(4, 3, 5, 8), draw(4, 3, seed=1)
    sites = [Site(("a", "b", "c"), w, survey=[0.5] * 3) for w in weights]
    stacked = method.merge_matrices(deltas, sites)
    for i, site in enumerate(sites):
        alone = method.merge_matrices(deltas[i : i + 1], [site])[0]
        assert measure_error(stacked[i], alone) < 1e-12
