"""The limit cases that the methods state, and their arithmetic against computations written out here."""

import math
from dataclasses import replace

import pytest
import torch
from merging.conftest import relative_error
from torch import Tensor, nn

from mergekit_lab import InputError
from mergekit_lab.merging import (
    DARE,
    DELLA,
    SLERP,
    TIES,
    TSVM,
    WUDI,
    AdaMerging,
    Breadcrumbs,
    ConsensusTA,
    Fisher,
    IsoC,
    IsoCTS,
    Method,
    ModelStock,
    RegMean,
    TaskArithmetic,
    WeightAverage,
    learn_coefficients,
    merge_state_dicts,
)
from mergekit_lab.merging.breadcrumbs import keep_middle
from mergekit_lab.merging.contract import Site
from mergekit_lab.merging.della import keep_probabilities
from mergekit_lab.merging.inputs import open_inputs
from mergekit_lab.merging.iso import direction_budget
from mergekit_lab.merging.spectral import SpectralMethod
from mergekit_lab.merging.wudi import least_interference

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def merge_one(method: Method, deltas: Tensor, base: Tensor | None = None, name: str = "w", **options) -> Tensor:
    """The merged task vector of one tensor."""
    origin = torch.zeros_like(deltas[0]) if base is None else base
    experts = [{name: origin + delta} for delta in deltas]
    return merge_state_dicts({name: origin}, experts, method, **options)[name] - origin


# --- WUDI ---------------------------------------------------------------------------------------------


def interference(merged: Tensor, deltas: Tensor) -> Tensor:
    """The objective as the paper prints it, for one matrix."""
    products = (merged - deltas) @ deltas.mT
    return (products.square().sum(dim=(1, 2)) / deltas.square().sum(dim=(1, 2))).sum()


def test_wudi_follows_torchs_adam_on_the_printed_objective() -> None:
    deltas = draw(2, 3, 6, 9)
    for matrices, found in zip(deltas, least_interference(deltas, 25, 1e-3), strict=True):
        merged = matrices.sum(dim=0).requires_grad_()
        optimizer = torch.optim.Adam([merged], lr=1e-3)
        for _ in range(25):
            optimizer.zero_grad()
            interference(merged, matrices).backward()
            optimizer.step()
        assert relative_error(found, merged.detach()) < 1e-12


def test_wudi_lowers_the_interference_and_without_steps_is_the_sum() -> None:
    deltas = draw(4, 6, 9)
    before = merge_one(WUDI(all_2d=True, iterations=0), deltas)
    assert relative_error(before, deltas.sum(dim=0)) < 1e-12
    after = merge_one(WUDI(all_2d=True, lr=1e-3), deltas)
    assert interference(after, deltas) < 0.8 * interference(before, deltas)


def test_wudi_takes_nothing_from_an_expert_equal_to_the_base() -> None:
    deltas = draw(3, 6, 9)
    method = WUDI(all_2d=True, lr=1e-3, iterations=20)
    assert (
        relative_error(merge_one(method, torch.cat([deltas, 0 * deltas[:1]])), merge_one(method, deltas))
        < 1e-12
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
    assert WUDI(all_2d=True).is_matrix(name, (4, 4))
    assert not WUDI().is_matrix(name, (4,))


def test_wudi_refuses_a_model_in_which_it_knows_no_name() -> None:
    with pytest.raises(InputError, match="set all_2d=True"):
        merge_one(WUDI(), draw(2, 3, 4))


# --- Iso ----------------------------------------------------------------------------------------------


def test_iso_c_gives_every_direction_the_mean_singular_value() -> None:
    deltas = draw(3, 5, 8)
    u, s, vh = torch.linalg.svd(deltas.sum(dim=0), full_matrices=False)
    merged = merge_one(IsoC(), deltas)
    assert relative_error(merged, s.mean() * u @ vh) < 1e-12
    assert relative_error(torch.linalg.svdvals(merged), s.mean().expand(5)) < 1e-12


def test_iso_cts_with_common_directions_only_is_iso_c() -> None:
    deltas = draw(3, 5, 8)
    assert relative_error(merge_one(IsoCTS(common=1.0), deltas), merge_one(IsoC(), deltas)) < 1e-12
    assert relative_error(merge_one(IsoCTS(common=0.4), deltas), merge_one(IsoC(), deltas)) > 1e-2


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
    assert direction_budget(r, experts, common) == (own, shared)


@pytest.mark.parametrize("method", [IsoC(), IsoCTS(), IsoCTS(common=0.4)], ids=repr)
def test_iso_leaves_directions_that_no_expert_has(method: Method) -> None:
    deltas = draw(3, 6, 2) @ draw(3, 2, 9, seed=1)
    deltas[2] = 0
    notes: dict = {}
    merged = merge_one(method, deltas, notes=notes)
    values = torch.linalg.svdvals(merged)
    assert len(notes["w"].keys() & {"rank", "rank_deficient"}) == 1
    if isinstance(method, IsoC):
        assert relative_error(values[:4], values[0].expand(4)) < 1e-10
    assert float(values[4]) < 1e-12 * float(values[0])
    assert torch.equal(merge_one(method, 0 * deltas), torch.zeros(6, 9, dtype=F64))


# --- RegMean ------------------------------------------------------------------------------------------


def regmean(method: RegMean, deltas: Tensor, grams: Tensor, base: Tensor | None = None) -> Tensor:
    statistics = {"gram": [{"fc": gram} for gram in grams]}
    return merge_one(method, deltas, base, "fc.weight", statistics=statistics)


def test_regmean_is_the_least_squares_fit_to_the_experts_outputs() -> None:
    inputs, deltas, base = draw(3, 20, 5), draw(3, 4, 5, seed=1), draw(4, 5, seed=2)
    weights = base + deltas
    rows = inputs.reshape(-1, 5)
    outputs = (inputs @ weights.mT).reshape(-1, 4)
    wanted = torch.linalg.lstsq(rows, outputs).solution.T
    grams = inputs.mT @ inputs
    before = grams.clone()
    assert relative_error(regmean(RegMean(), deltas, grams, base) + base, wanted) < 1e-12
    assert torch.equal(grams, before)
    assert relative_error(regmean(RegMean(), deltas, 7 * grams, base) + base, wanted) < 1e-12


def test_regmean_without_off_diagonals_weighs_input_by_input() -> None:
    inputs, deltas = draw(3, 20, 5), draw(3, 4, 5, seed=1)
    energy = inputs.square().sum(dim=1)
    wanted = (energy[:, None] * deltas).sum(dim=0) / energy.sum(dim=0)
    assert relative_error(regmean(RegMean(ratio=0.0), deltas, inputs.mT @ inputs), wanted) < 1e-12


def test_regmean_with_equal_grams_a_large_ridge_or_no_gram_is_the_mean() -> None:
    inputs, deltas = draw(3, 20, 5), draw(3, 4, 5, seed=1)
    grams = inputs.mT @ inputs
    mean = deltas.mean(dim=0)
    assert relative_error(regmean(RegMean(), deltas, grams[:1].expand(3, -1, -1)), mean) < 1e-12
    assert relative_error(regmean(RegMean(ridge=1e12), deltas, grams), mean) < 1e-10
    some = regmean(RegMean(ridge=0.1), deltas, grams)
    assert relative_error(some, mean) > 1e-2
    assert relative_error(regmean(RegMean(ridge=0.1), deltas, 100 * grams), some) < 1e-12
    assert relative_error(merge_one(RegMean(), deltas, statistics={"gram": [{}] * 3}), mean) < 1e-12
    with pytest.raises(InputError, match="gram of 0 holds nothing under the names of this model"):
        merge_one(RegMean(), deltas, name="fc2.weight", statistics={"gram": [{"fc": g} for g in grams]})
    with pytest.raises(InputError, match=r"gram of 1 and gram of 0 differ in \(fc\)"):
        merge_one(
            RegMean(), deltas, name="fc.weight", statistics={"gram": [{"fc": grams[0]}, {}, {"fc": grams[2]}]}
        )


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_regmean_names_the_tensor_whose_grams_are_singular(dtype: torch.dtype) -> None:
    inputs, deltas = draw(2, 20, 5).to(dtype), draw(2, 4, 5, seed=1).to(dtype)
    inputs[..., 4] = inputs[..., 0] - 2 * inputs[..., 1]
    grams = inputs.mT @ inputs
    with pytest.raises(InputError, match=r"grams of 'fc.weight' are singular \(some inputs are combinations"):
        regmean(RegMean(), deltas, grams)
    assert bool(torch.isfinite(regmean(RegMean(ratio=0.9), deltas, grams)).all())
    inputs[..., 4] = 0
    dead = inputs.mT @ inputs
    with pytest.raises(InputError, match=r"'fc.weight' are singular \(1 inputs have no positive energy"):
        regmean(RegMean(), deltas, dead)
    assert bool(torch.isfinite(regmean(RegMean(ridge=1e-3), deltas, dead)).all())


def test_regmean_names_a_gram_that_does_not_fit_its_weight() -> None:
    with pytest.raises(InputError, match=r"gram of 'fc.weight' is \[4, 4\] and the tensor \[4, 5\]"):
        regmean(RegMean(), draw(2, 4, 5), torch.eye(4, dtype=F64).expand(2, 4, 4))


# --- Breadcrumbs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("density", "gamma", "kept"),
    [
        (0.3, 0.2, {6.0, 7.0, 8.0}),
        (0.3, 0.0, {8.0, 9.0, 10.0}),
        (0.9, 0.2, set(map(float, range(1, 10)))),  # the density leaves room to drop one at the top
        (1.0, 0.5, set(map(float, range(1, 11)))),
        (0.3, 0.19, {7.0, 8.0, 9.0}),  # shares are rounded down
        (0.05, 0.0, set()),
    ],
)
def test_breadcrumbs_keeps_the_middle_of_the_magnitudes(density: float, gamma: float, kept: set[float]) -> None:
    signs = torch.tensor([1.0, -1.0]).repeat(5)
    deltas = torch.stack([signs * torch.arange(1.0, 11), torch.arange(10.0, 0, -1)])
    for delta, row in zip(deltas, keep_middle(deltas, density, gamma), strict=True):
        assert set(row[row != 0].abs().tolist()) == kept
        assert torch.equal(row[row != 0], delta[row != 0])


def test_breadcrumbs_and_della_at_density_one_are_their_inner_method() -> None:
    deltas = draw(3, 6, 7)
    for inner in (TaskArithmetic(coefficient=0.4), TIES(preset="mergekit", density=0.5), IsoC(coefficient=2.0)):
        wanted = merge_one(inner, deltas)
        assert torch.equal(merge_one(Breadcrumbs(density=1.0, inner=inner), deltas), wanted)
        assert torch.equal(merge_one(DELLA(density=1.0, inner=inner), deltas), wanted)


@pytest.mark.parametrize("method", [Breadcrumbs(inner=TIES()), DELLA(inner=TIES())], ids=repr)
def test_tensor_by_tensor_methods_refuse_an_inner_method_that_surveys_the_model(method: Method) -> None:
    with pytest.raises(InputError, match="TIES surveys the task vectors of the whole model"):
        merge_one(method, draw(2, 3, 4))


# --- DELLA --------------------------------------------------------------------------------------------


def test_della_keeps_by_rank_of_magnitude_within_a_row() -> None:
    delta = torch.tensor([[-3.0, 1.0, 2.0], [0.1, -0.2, 0.3]])
    wanted = torch.tensor([[0.7, 0.5, 0.6], [0.5, 0.6, 0.7]], dtype=F64)
    assert torch.allclose(keep_probabilities(delta, 0.6, 0.1), wanted)
    assert torch.allclose(keep_probabilities(delta[0], 0.6, 0.1), wanted[0])
    kernel = draw(4, 3, 2, 2)
    found = keep_probabilities(kernel, 0.6, 0.1)
    assert torch.equal(found, keep_probabilities(kernel.flatten(1), 0.6, 0.1).view_as(kernel))
    assert torch.allclose(found.flatten(1).mean(dim=1), torch.full((4,), 0.6, dtype=F64))
    assert float(keep_probabilities(torch.tensor(2.0), 0.6, 0.1)) == 0.6


def test_della_without_a_window_is_dare() -> None:
    deltas = draw(3, 50, 40)
    for inner in (TaskArithmetic(coefficient=0.4), TIES(preset="mergekit", density=1.0)):
        found = merge_one(DELLA(density=0.5, epsilon=0.0, seed=3, inner=inner), deltas)
        assert relative_error(found, merge_one(DARE(drop=0.5, seed=3, inner=inner), deltas)) < 1e-12


def test_della_is_unbiased_and_keeps_large_entries_more_often() -> None:
    entries = 200_000
    delta = torch.linspace(1, 2, entries)[None]
    found = merge_one(DELLA(density=0.5, epsilon=0.4, inner=TaskArithmetic(coefficient=1.0)), delta)
    small, large = found[: entries // 10], found[-entries // 10 :]
    assert float((small != 0).float().mean()) == pytest.approx(0.14, abs=0.01)
    assert float((large != 0).float().mean()) == pytest.approx(0.86, abs=0.01)
    assert float(found.mean()) == pytest.approx(1.5, abs=0.02)
    assert float(small.mean()) == pytest.approx(1.05, abs=0.06)


def test_della_with_l1_rescaling_restores_each_tensors_norm() -> None:
    delta = draw(1, 50, 40)
    found = merge_one(DELLA(rescale="l1", inner=TaskArithmetic(coefficient=1.0)), delta)
    assert float(found.abs().sum()) == pytest.approx(float(delta.abs().sum()), rel=1e-12)
    assert 0.6 < float((found != 0).float().mean()) < 0.8


# --- consensus ----------------------------------------------------------------------------------------


def test_consensus_keeps_what_enough_experts_use() -> None:
    deltas = torch.tensor([[1.0, 1.0, 0.3, 1.0], [1.0, 0.0, 0.3, -1.0], [1.0, 0.0, -0.1, 0.1]], dtype=F64)
    # tall = 1/2: expert t uses an entry where |δ_t| > |τ − δ_t| / 2; τ = [3, 1, 0.5, 0.1]
    masks = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]])
    total = deltas.sum(dim=0)
    for k in range(4):
        found = merge_one(ConsensusTA(k=k, tall=0.5, coefficient=1.0), deltas)
        assert relative_error(found, total * (masks.sum(dim=0) >= k)) < 1e-12, k
    by_expert = merge_one(ConsensusTA(k=1, tall=[0.5, 9.0, 9.0], coefficient=1.0), deltas)
    assert torch.equal(by_expert != 0, torch.tensor([False, True, True, True]))


def test_consensus_refuses_more_agreement_than_experts_and_thresholds_of_others() -> None:
    with pytest.raises(InputError, match="k is 3, and 2 experts"):
        merge_one(ConsensusTA(k=3), draw(2, 4))
    with pytest.raises(InputError, match="tall: weights name 'svhn', which is no expert"):
        merge_one(ConsensusTA(tall={"svhn": 0.3}), draw(2, 4))


# --- SLERP and Model Stock ----------------------------------------------------------------------------


def test_slerp_goes_from_the_first_expert_to_the_second_along_the_arc() -> None:
    base, deltas = draw(3, 4), draw(2, 3, 4, seed=1)
    for t, expert in ((0.0, 0), (1.0, 1)):
        assert relative_error(merge_one(SLERP(t=t), deltas, base), deltas[expert]) < 1e-12
    a, b = torch.tensor([[3.0, 0.0], [0.0, 3.0]], dtype=F64)
    point = torch.tensor([3 * math.cos(math.pi / 6), 1.5], dtype=F64)
    assert relative_error(merge_one(SLERP(t=1 / 3), torch.stack([a, b])), point) < 1e-12
    start = draw(2)
    assert relative_error(merge_one(SLERP(t=1 / 3), torch.stack([a, b]) - start, start) + start, point) < 1e-12
    backwards = merge_one(SLERP(t=2 / 3), torch.stack([b, a]))
    assert relative_error(backwards, point) < 1e-12


def test_slerp_is_linear_between_parallel_and_opposite_tensors() -> None:
    a = draw(5)
    assert relative_error(merge_one(SLERP(t=0.25), torch.stack([a, 3 * a])), 1.5 * a) < 1e-12
    assert relative_error(merge_one(SLERP(t=0.25), torch.stack([a, -a])), 0.5 * a) < 1e-12
    assert relative_error(merge_one(SLERP(t=0.25), torch.stack([0 * a, a])), math.sin(math.pi / 8) * a) < 1e-12
    assert torch.equal(merge_one(SLERP(), torch.zeros(2, 3)), torch.zeros(3))


def test_model_stock_moves_to_the_mean_by_the_angle() -> None:
    a = torch.tensor([1.0, 0.0], dtype=F64)
    for angle in (0.0, 0.3, 1.0, math.pi / 2):
        b = torch.tensor([math.cos(angle), math.sin(angle)], dtype=F64)
        cosine = math.cos(angle)
        wanted = 2 * cosine / (1 + cosine) * (a + b) / 2
        for scale in (1.0, 1e-6):
            found = merge_one(ModelStock(), scale * torch.stack([a, b]))
            assert float((found / scale - wanted).norm()) < 1e-12
    assert torch.equal(merge_one(ModelStock(), torch.stack([a, -a])), torch.zeros(2, dtype=F64))
    assert torch.equal(merge_one(ModelStock(), torch.zeros(2, 3)), torch.zeros(3))


def test_model_stock_takes_an_angle_for_each_row_if_asked() -> None:
    deltas = draw(3, 4, 5)
    rows = torch.stack([merge_one(ModelStock(), deltas[:, i]) for i in range(4)])
    assert relative_error(merge_one(ModelStock(filter_wise=True), deltas), rows) < 1e-12
    assert relative_error(merge_one(ModelStock(), deltas), rows) > 1e-2
    vector = deltas[:, 0]
    assert torch.equal(merge_one(ModelStock(filter_wise=True), vector), merge_one(ModelStock(), vector))


def test_model_stock_notes_task_vectors_that_oppose_each_other() -> None:
    notes: dict = {}
    deltas = torch.tensor([[1.0, 0.0], [-0.6, 0.8]], dtype=F64)
    merge_one(ModelStock(), deltas, notes=notes)
    assert notes["w"]["ratio"] == pytest.approx(2 * -0.6 / (1 - 0.6))


# --- AdaMerging ---------------------------------------------------------------------------------------


def test_adamerging_with_fixed_coefficients_is_a_sum_by_tensor_and_expert() -> None:
    base = {"fc.weight": draw(3, 4), "fc.bias": draw(3, seed=1), "scale": draw(seed=2)}
    a, b = ({n: v + draw(*v.shape, seed=s) for n, v in base.items()} for s in (3, 4))
    alphas = {"a": {"fc.weight": 0.1, "*": 0.7}, "b": {"fc.*": 0.5}}
    merged = merge_state_dicts(base, {"a": a, "b": b}, AdaMerging(weights=alphas))
    for name, first, second in (("fc.weight", 0.1, 0.5), ("fc.bias", 0.7, 0.5), ("scale", 0.7, 0.3)):
        wanted = base[name] + first * (a[name] - base[name]) + second * (b[name] - base[name])
        assert relative_error(merged[name], wanted) < 1e-12, name
    start = merge_state_dicts(base, {"a": a, "b": b}, AdaMerging())
    for name, value in merge_state_dicts(base, {"a": a, "b": b}, TaskArithmetic(coefficient=0.3)).items():
        assert relative_error(start[name], value) < 1e-12


class Tiny(nn.Module):
    """An encoder with a buffer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 6, dtype=F64)
        self.fc2 = nn.Linear(6, 6, bias=False, dtype=F64)
        self.fc3 = nn.Linear(6, 6, bias=False, dtype=F64)
        self.fc3.weight = self.fc2.weight
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


def tiny_problem():
    """Base, experts, the callable of logits and one batch: two tasks with a frozen head each."""
    torch.manual_seed(0)
    encoder = Tiny().requires_grad_(False)
    base = encoder.state_dict()
    experts = {}
    for seed, name in enumerate(("a", "b")):
        moved = {n: v + draw(*v.shape, seed=seed) if v.dtype == F64 else v for n, v in base.items()}
        experts[name] = moved | {"fc3.weight": moved["fc2.weight"]}
    heads = draw(2, 6, 3, seed=5)

    def logits(state, batch) -> list[Tensor]:
        return [
            torch.func.functional_call(encoder, state, x) @ head for x, head in zip(batch, heads, strict=True)
        ]

    return base, experts, logits, draw(2, 16, 4, seed=6)


def entropy_of(state, logits, batch) -> float:
    probabilities = [out.softmax(dim=1) for out in logits(state, batch)]
    return sum(float(-(p * p.log()).sum(dim=1).mean()) for p in probabilities)


@pytest.mark.parametrize("layer_wise", [True, False])
def test_learning_coefficients_lowers_the_entropy_of_the_merged_model(layer_wise: bool) -> None:
    base, experts, logits, batch = tiny_problem()
    before = {name: value.clone() for name, value in base.items()}
    method, entropies = learn_coefficients(base, experts, logits, [batch] * 100, layer_wise=layer_wise, lr=1e-2)
    first = entropy_of(merge_state_dicts(base, experts, AdaMerging()), logits, batch)
    last = entropy_of(merge_state_dicts(base, experts, method), logits, batch)
    assert entropies[0] == pytest.approx(first, rel=1e-12)
    assert last < entropies[-1] < 0.9 * first
    assert all(torch.equal(base[n], v) for n, v in before.items())
    assert set(method.weights) == {"a", "b"}
    if layer_wise:
        assert list(method.weights["a"]) == ["fc1.weight", "fc1.bias", "fc2.weight"]
        values = [v for by_tensor in method.weights.values() for v in by_tensor.values()]
    else:
        values = list(method.weights.values())
    assert all(0 <= v <= 1 for v in values)


def test_the_first_step_moves_each_coefficient_by_lr_against_its_slope() -> None:
    """Adam's first step is lr·sign(gradient); the slope is a finite difference through the merger."""
    base, experts, logits, batch = tiny_problem()
    method, _ = learn_coefficients(base, experts, logits, [batch])
    for expert in experts:
        for tensor in ("fc1.weight", "fc1.bias", "fc2.weight"):

            def entropy(alpha: float, expert=expert, tensor=tensor) -> float:
                weights = {e: {tensor: alpha} if e == expert else 0.3 for e in experts}
                merged = merge_state_dicts(base, experts, AdaMerging(weights=weights))
                return entropy_of(merged, logits, batch)

            slope = entropy(0.3 + 1e-5) - entropy(0.3 - 1e-5)
            wanted = 0.3 - math.copysign(1e-3, slope)
            assert method.weights[expert][tensor] == pytest.approx(wanted, abs=1e-6)


def test_learned_coefficients_stay_between_zero_and_one() -> None:
    base, experts, logits, batch = tiny_problem()
    method, _ = learn_coefficients(base, experts, logits, [batch] * 4, layer_wise=False, lr=5.0)
    assert set(method.weights.values()) <= {0.0, 1.0}


def test_learning_refuses_what_it_cannot_use() -> None:
    base, experts, logits, batch = tiny_problem()
    with pytest.raises(InputError, match="no batch was given"):
        learn_coefficients(base, experts, logits, [])
    with pytest.raises(InputError, match="lr is 0"):
        learn_coefficients(base, experts, logits, [batch], lr=0)
    with pytest.raises(InputError, match="start is 2"):
        learn_coefficients(base, experts, logits, [batch], start=2)
    with pytest.raises(InputError, match="entropy of the predictions is nan at step 0"):
        learn_coefficients(base, experts, lambda s, b: [x * math.nan for x in logits(s, b)], [batch])
    broken = {n: v for n, v in experts["b"].items() if n != "fc1.bias"}
    with pytest.raises(InputError, match="'b' lacks 1 tensors"):
        learn_coefficients(base, experts | {"b": broken}, logits, [batch])


# --- weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [WUDI(all_2d=True, iterations=5), IsoC(), IsoCTS(common=0.4), ConsensusTA(k=0), RegMean(), Breadcrumbs()],
    ids=repr,
)
def test_weights_scale_the_experts_before_they_are_merged(method: Method) -> None:
    """The stated meaning of `λ` (for `RegMean` without Grams; for `Breadcrumbs` through its inner method)."""
    deltas = draw(3, 6, 7)
    factors = [0.5, 2.0, 0.0]
    scaled = deltas * torch.tensor(factors, dtype=F64)[:, None, None]
    if isinstance(method, Breadcrumbs):
        with_weights = replace(method, inner=TaskArithmetic(weights=factors))
    else:
        with_weights = replace(method, weights=factors)
    options = {"statistics": {"gram": [{}] * 3}} if method.side_inputs else {}
    assert (
        relative_error(merge_one(with_weights, deltas, **options), merge_one(method, scaled, **options)) < 1e-9
    )


def test_weights_of_regmean_scale_the_grams() -> None:
    inputs, deltas = draw(3, 20, 5), draw(3, 4, 5, seed=1)
    grams = inputs.mT @ inputs
    factors = torch.tensor([0.5, 2.0, 1.0], dtype=F64)
    found = regmean(RegMean(weights=factors.tolist()), deltas, grams)
    assert relative_error(found, regmean(RegMean(), deltas, factors.view(3, 1, 1) * grams)) < 1e-12


def test_an_average_of_two_is_slerp_half_way_between_tensors_of_one_direction() -> None:
    base, deltas = 100 + draw(4, 5), 0.01 * draw(2, 4, 5, seed=1)
    assert relative_error(merge_one(SLERP(), deltas, base), merge_one(WeightAverage(), deltas, base)) < 1e-9


@pytest.mark.parametrize("method", [WUDI(lr=1e-3), TSVM(), IsoC(), IsoCTS(common=0.4)], ids=repr)
def test_a_stack_of_matrices_merges_as_each_does_alone(method: SpectralMethod) -> None:
    """Also where the experts weigh differently from tensor to tensor."""
    deltas, weights = draw(4, 3, 5, 8), draw(4, 3, seed=1)
    sites = [Site(("a", "b", "c"), w) for w in weights]
    stacked = method.merge_matrices(deltas, sites)
    for i, site in enumerate(sites):
        alone = method.merge_matrices(deltas[i : i + 1], [site])[0]
        assert relative_error(stacked[i], alone) < 1e-12


@pytest.mark.parametrize("name", ["q_proj", "fc2", "gate_up_proj", "experts.0.w3", "attn.c_attn", "lm_head"])
def test_wudi_knows_the_names_of_attention_and_mlp_weights(name: str) -> None:
    assert WUDI().is_matrix(f"layers.0.{name}.weight", (4, 4)) == (name != "lm_head")


# --- weights that are stored as [in, out] ----------------------------------------------------------------


def conv1d_block(seed: int) -> dict[str, Tensor]:
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
        WUDI(lr=1e-2, iterations=5),
        IsoCTS(common=0.4),
        RegMean(),
        ModelStock(filter_wise=True),
        Breadcrumbs(density=1.0, inner=IsoCTS(common=0.4)),
    ],
    ids=repr,
)
def test_how_a_weight_is_stored_does_not_matter(method: Method) -> None:
    base, *experts = (conv1d_block(seed) for seed in range(4))
    inputs = {n.removesuffix(".weight"): len(v) for n, v in base.items() if n.endswith(".weight")}
    rows = [{name: draw(20, size, seed=seed) for name, size in inputs.items()} for seed in range(3)]
    grams = [{name: x.mT @ x for name, x in of_expert.items()} for of_expert in rows]
    statistics = {"gram": grams} if method.side_inputs else {}
    found = merge_state_dicts(base, experts, method, statistics=statistics)
    wanted = merge_state_dicts(as_linear(base), list(map(as_linear, experts)), method, statistics=statistics)
    for name, value in as_linear(found).items():
        assert relative_error(value, wanted[name]) < 1e-12, name
    assert not torch.equal(found["h.attn.c_attn.weight"], base["h.attn.c_attn.weight"])


def test_the_layout_of_square_weights_is_that_of_their_kind() -> None:
    def transposed(state: dict[str, Tensor]) -> frozenset[str]:
        return open_inputs(state, [state], WeightAverage()).transposed

    block = conv1d_block(0)
    assert transposed(block) == {n for n in block if n.startswith("h.") and n.endswith(".weight")}
    assert not transposed(as_linear(block))
    assert not transposed({"norm.weight": draw(3, 4), "norm.bias": draw(3, 4)})


# --- what rounding, or nothing at all, may not spoil ------------------------------------------------------


def test_wudi_leaves_experts_that_do_not_interfere() -> None:
    deltas = torch.block_diag(draw(3, 4), draw(5, 6, seed=1)).float()
    parts = torch.stack([deltas, deltas])
    parts[0, 3:], parts[1, :3] = 0, 0
    assert torch.equal(merge_one(WUDI(all_2d=True, lr=1e-2), parts), deltas)


def test_fisher_refuses_what_it_cannot_normalise_and_what_overflows() -> None:
    deltas = draw(2, 3).float()
    nothing, small, large = ({"w": torch.full((3,), value)} for value in (0.0, 1e-30, 3e38))
    with pytest.raises(InputError, match=r"fisher of 1 is 0 everywhere"):
        merge_one(Fisher(normalise=True), deltas, fishers=[large, nothing])
    found = merge_one(Fisher(normalise=True, floor=0.0), deltas, fishers=[small, large])
    assert relative_error(found, deltas.mean(dim=0)) < 1e-6
    with pytest.raises(InputError, match=r"merging w overflows torch.float32"):
        merge_one(Fisher(), deltas, fishers=[large, large])


def test_whole_model_trimming_of_a_model_without_entries_is_that_model() -> None:
    assert merge_one(TIES(), torch.zeros(2, 0, 3)).shape == (0, 3)
