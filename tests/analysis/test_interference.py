"""What is measured of task vectors equals its definition, computed densely."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.analysis import Interference, advise, measure_bound, measure_layers
from mergekit_lab.merging import TaskArithmetic
from mergekit_lab.merging.contract import Site
from mergekit_lab.merging.inputs import open_inputs
from mergekit_lab.merging.spectral import whiten_atoms

SHAPES = {"a.weight": (12, 20), "a.bias": (12,), "scale": (), "b.weight": (300, 280), "conv": (4, 3, 2, 2)}


def draw(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: scale * torch.randn(s, generator=generator, dtype=torch.float64).float() for n, s in SHAPES.items()
    }


def make_models(count: int = 3) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    base = draw(0)
    return base, {f"e{t}": {n: base[n] + d for n, d in draw(t + 1, 0.1).items()} for t in range(count)}


def measure(base, experts, fishers=None, **options) -> Interference:
    inputs = open_inputs(base, experts, TaskArithmetic())
    sides = fishers and {n: open_checkpoint(f, n) for n, f in fishers.items()}
    interference = Interference(tuple(experts), fishers is not None)
    for layer, traces in measure_layers(inputs, fishers=sides, **options):
        interference.add(layer, traces)
    return interference


def flatten(base, expert) -> Tensor:
    return torch.cat([(expert[n] - base[n]).flatten() for n in base]).double()


def test_norms_cosines_and_conflicts_are_their_definitions(monkeypatch) -> None:
    monkeypatch.setattr("mergekit_lab.analysis.interference._BLOCK", 1000)
    base, experts = make_models()
    experts["e1"]["a.weight"][:6] = base["a.weight"][:6]
    interference = measure(base, experts)
    deltas = torch.stack([flatten(base, e) for e in experts.values()])
    torch.testing.assert_close(interference.total.norms, deltas.norm(dim=1), rtol=1e-5, atol=0)
    assert interference.base_norm == pytest.approx(
        float(torch.cat([b.flatten() for b in base.values()]).norm()), rel=1e-5
    )
    for i, a in enumerate(deltas):
        for j, b in enumerate(deltas):
            both = (a != 0) & (b != 0)
            against = both & (a.sign() != b.sign())
            smaller = torch.minimum(a.abs(), b.abs())
            assert interference.total.cosine[i, j] == pytest.approx(
                float(a @ b / a.norm() / b.norm()), abs=1e-5
            )
            assert interference.total.sign_conflict[i, j] == pytest.approx(
                int(against.sum()) / int(both.sum()), abs=1e-9
            )
            wanted = float(smaller[against].sum() / smaller.sum())
            assert interference.total.canceling[i, j] == pytest.approx(wanted, abs=1e-5)
    assert [layer.name for layer in interference.layers] == list(SHAPES)


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_spectra_are_those_of_the_dense_decomposition(name: str) -> None:
    """The larger matrix goes through subspace iteration; leading values stand apart, as task vectors' do."""
    base, experts = make_models()
    torch.manual_seed(0)
    m, n = SHAPES[name]
    for t, expert in enumerate(experts.values()):
        low = (
            torch.linalg.qr(torch.randn(m, 4))[0]
            * torch.tensor([8.0, 6, 4, 3])
            @ torch.linalg.qr(torch.randn(n, 4))[0].T
        )
        expert[name] = base[name] + low + 0.001 * (t + 1) * torch.randn(m, n)
    (layer,) = [x for x in measure(base, experts, rank=4).layers if x.name == name]
    k = layer.spectra.rank
    assert k == 4
    triplets = [
        torch.linalg.svd((e[name] - base[name]).double(), full_matrices=False) for e in experts.values()
    ]
    for i, (u, s, vh) in enumerate(triplets):
        torch.testing.assert_close(layer.spectra.values[i], s[:k], rtol=1e-4, atol=0)
        assert layer.spectra.stable_rank[i] == pytest.approx(float(s.square().sum() / s[0] ** 2), rel=1e-4)
        assert layer.spectra.energy[i] == pytest.approx(
            float(s[:k].square().sum() / s.square().sum()), rel=1e-4
        )
        for j, (other, _, otherh) in enumerate(triplets):
            left = (u[:, :k].T @ other[:, :k]).square().sum() / k
            right_overlap = (vh[:k] @ otherh[:k].T).square().sum() / k
            assert layer.spectra.overlap[i, j] == pytest.approx(float(left + right_overlap) / 2, abs=1e-4)
    assert layer.spectra.chance == pytest.approx((k / m + k / n) / 2)


def test_overlap_of_unrelated_matrices_is_chance() -> None:
    layer = next(x for x in measure(*make_models()).layers if x.name == "b.weight")
    off = layer.spectra.overlap[~torch.eye(3, dtype=torch.bool)]
    assert float(off.mean()) == pytest.approx(layer.spectra.chance, rel=0.25)


def test_harm_is_the_second_order_rise_of_an_experts_loss_by_anothers_task_vector() -> None:
    base, experts = make_models(2)
    fishers = {n: {k: v.square() for k, v in draw(10 + t).items()} for t, n in enumerate(experts)}
    interference = measure(base, experts, fishers)
    for i, first in enumerate(experts):
        for j, second in enumerate(experts):
            wanted = 0.5 * sum(
                float((fishers[first][n].double() * (experts[second][n] - base[n]).double() ** 2).sum())
                for n in base
            )
            assert float(interference.total.harm[i, j]) == pytest.approx(wanted, rel=1e-5)
        assert float(interference.fisher_traces[i]) == pytest.approx(
            sum(float(v.sum()) for v in fishers[first].values()), rel=1e-5
        )


def test_the_rank_is_shared_among_the_experts() -> None:
    interference = measure(*make_models(), rank=100)
    spectra = {layer.name: layer.spectra for layer in interference.layers if layer.spectra}
    assert {name: each.rank for name, each in spectra.items()} == {"a.weight": 4, "b.weight": 93}
    assert [each.values.shape for each in spectra.values()] == [(3, 4), (3, 16)]


def test_equal_experts_have_cosine_one_and_nothing_cancels() -> None:
    base, experts = make_models(1)
    interference = measure(base, {"x": experts["e0"], "y": experts["e0"]})
    assert float(interference.total.cosine[0, 1]) == pytest.approx(1)
    assert float(interference.total.canceling[0, 1]) == 0


def test_an_expert_equal_to_the_base_has_no_ratios_and_no_nan() -> None:
    base, experts = make_models(1)
    interference = measure(base, {"x": experts["e0"], "y": dict(base)})
    for value in (interference.total.cosine, interference.total.canceling, interference.total.sign_conflict):
        assert torch.isfinite(value).all()
        assert float(value[0, 1]) == 0
    assert all(torch.isfinite(x.spectra.stable_rank).all() for x in interference.layers if x.spectra)


def test_bad_inputs_are_named() -> None:
    base, experts = make_models(2)
    with pytest.raises(InputError, match="rank is 0"):
        measure(base, experts, rank=0)
    with pytest.raises(InputError, match=r"e1.*'a.weight'.*\[12, 20\]"):
        measure(base, experts, {"e0": draw(1), "e1": {}})
    experts["e1"]["conv"][0] = float("nan")
    with pytest.raises(InputError, match=r"'conv'.*e1 holds 12 NaN"):
        measure(base, experts)


def test_advice_follows_what_was_measured() -> None:
    base, experts = make_models(3)
    plain = [a.text for a in advise(measure(base, experts))]
    assert plain[0].startswith("merger=tsvm")
    assert len(plain) == 3
    assert plain[2].startswith("evaluate merges")
    experts["e2"] = {n: base[n] + 5 * (experts["e2"][n] - base[n]) for n in base}
    fishers = {n: {k: v.square() * 10**t for k, v in draw(t).items()} for t, n in enumerate(experts)}
    advice = advise(measure(base, experts, fishers))
    assert "normalize=trace" in advice[2].text
    assert "look at e2 first" in advice[3].text
    assert all(a.evidence for a in advice)
    vectors = {"v": torch.zeros(3)}
    assert advise(measure(vectors, {x: {"v": torch.randn(3)} for x in "xy"}))[1].text == "no rank to choose"


def test_advice_for_experts_that_are_one_or_equal_or_the_base() -> None:
    base, experts = make_models(2)
    first, second = experts.values()

    def advise_on(**named) -> list[str]:
        return [a.text for a in advise(measure(base, named))]

    (only,) = advise_on(one=first)
    assert only.startswith("nothing to merge: use one")
    assert advise_on(x=first, y=first) == [advise_on(x=first, y=first)[0]]
    assert advise_on(x=first, y=first)[0].startswith("merger=average loses next to nothing")
    farther = {n: base[n] + 1.5 * (first[n] - base[n]) for n in base}
    assert advise_on(x=first, y=farther)[0].startswith("merger=tsvm")
    unmoved, *others = advise_on(x=first, y=second, z=dict(base))
    assert unmoved.startswith("leave z out")
    assert others == advise_on(x=first, y=second)
    assert [text.split()[1] for text in advise_on(x=dict(base), y=dict(base))] == ["x", "y"]
    assert "one" in advise_on(one=first, y=dict(base))[1]


def test_advice_cites_what_stands_in_its_studies() -> None:
    base, experts = make_models(3)
    method, rank = advise(measure(base, experts))[:2]
    folder = Path(__file__).parents[2]
    study = (folder / "experiments/mergopt_smollm2/README.md").read_text()
    (row,) = (line for line in study.splitlines() if line.startswith("| AdamW | 3 |"))
    for number in ("76.5", "36.9", "39.6", "45.6", "56.8 ± 1.9", "58.9 ± 2.9"):
        assert number in method.evidence
        assert number in row
    first = experts["e0"]
    alike = advise(measure(base, {"x": first, "y": first}))[0]
    (row,) = (line for line in study.splitlines() if line.startswith("| SGD "))
    for number in ("76.0", "42.9", "57.9"):
        assert number in alike.evidence
        assert number in row
    study = (folder / "experiments/when_it_helps/README.md").read_text()
    cited_there = (("46 of 75", method), ("1 of 3", method), ("4.4 ± 1.2", rank), ("6.2 ± 0.1", rank))
    for number, cited in cited_there:
        assert number in cited.evidence
        assert number in study
    for number in ("68.1", "79.6", "86.2", "64.9", "72.0", "77.5"):
        assert number in method.evidence
        assert f"{number} ±" in study
    gallery = (folder / "docs/gallery.md").read_text()
    for number in ("80.7", "78.1", "95.8", "94.9"):
        assert number in rank.evidence
        assert number in gallery


@pytest.mark.parametrize(("entry", "problem"), [(float("nan"), "NaN or infinite"), (-1.0, "negative")])
def test_a_fisher_that_is_none_is_named(entry: float, problem: str) -> None:
    base, experts = make_models(2)
    fishers = {n: {k: v.square() for k, v in draw(10 + t).items()} for t, n in enumerate(experts)}
    fishers["e1"]["conv"][0, 0] = entry
    with pytest.raises(InputError, match=f"tensor 'conv' of e1 holds 4 {problem} entries"):
        measure(base, experts, fishers)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_bounds_terms_are_those_of_theorem_2(rank: int) -> None:
    """Against the dense matrices of the theorem."""
    generator = torch.Generator().manual_seed(0)
    deltas = torch.randn(2, 6, 7, generator=generator, dtype=torch.float64)
    fishers = torch.rand(2, 6, 7, generator=generator, dtype=torch.float64)
    bound = measure_bound(deltas, fishers, rank)
    atoms = whiten_atoms(deltas[None], rank, [Site(("a", "b"), torch.ones(2))])
    columns = torch.einsum("mp,np->mnp", atoms.u[0], atoms.v[0]).flatten(0, 1)
    curvature = torch.stack([torch.diag(fisher.flatten() + 1e-8) for fisher in fishers])
    inside, projected = deltas.flatten(1) @ columns, columns.T @ curvature @ columns
    mean = torch.linalg.solve(projected.sum(dim=0), torch.einsum("tpq,tq->p", projected, inside))
    conflict = torch.einsum("tp,tpq,tq->", mean - inside, projected, mean - inside) / 2
    outside = deltas.flatten(1) - inside @ columns.T
    residual = torch.einsum("ti,tij,tj->", outside, curvature, outside) / 2
    assert bound.conflict == pytest.approx(float(conflict))
    assert bound.residual == pytest.approx(float(residual))
    steps = columns @ mean - deltas.flatten(1)
    rise = torch.einsum("ti,tij,tj->", steps, curvature, steps) / 4
    assert rise <= bound.bound


def test_a_rank_below_the_task_vectors_own_loses_curvature_and_none_at_it() -> None:
    deltas = torch.zeros(2, 6, 6)
    for t, row in ((0, 0), (1, 3)):  # of rank 2, in rows and columns of their own
        deltas[t, row, row], deltas[t, row + 1, row + 1] = 2.0, 1.0
    fishers = torch.ones(2, 6, 6)
    assert [measure_bound(deltas, fishers, k).lost for k in (1, 2)] == pytest.approx([0.2, 0.0], abs=1e-9)


def test_no_direction_leaves_all_curvature_out() -> None:
    bound = measure_bound(torch.ones(3, 2, 4), torch.ones(3, 2, 4), 5)
    assert (bound.conflict, bound.lost) == (0.0, 1.0)
