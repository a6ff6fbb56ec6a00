"""A mixture's experts in one tensor merge as they do in a tensor each."""

import pytest
import torch
from merging.conftest import draw, measure_error
from torch import Tensor

from mergekit_lab import InputError
from mergekit_lab.merging import (
    CAT,
    DARE,
    DELLA,
    DOGE,
    TSVC,
    TSVM,
    WUDI,
    Breadcrumbs,
    EpiMer,
    Fisher,
    IsoC,
    IsoCTS,
    Method,
    ModelStock,
    RegMean,
    TaskArithmetic,
    merge_factors,
    merge_state_dicts,
    stream,
)
from mergekit_lab.merging.spectral import explain_shapes
from mergekit_lab.merging.stacks import Stack, find_stacks

PREFIX = "model.layers.0.mlp.experts"
EXPERTS, INNER, OUTER = 3, 6, 8
BY_MATRIX = [
    TSVM(),
    TSVM(rank=1, weights=[0.5, 2.0]),
    EpiMer(rank=2),
    EpiMer(rank=2, normalize="trace"),
    IsoC(),
    IsoCTS(common=0.4),
    WUDI(lr=1e-3, steps=9),
    WUDI(lr=1e-3, steps=9, all_matrices=True),
    DOGE(steps=9),
    DOGE(steps=9, all_matrices=True, weights=[0.5, 2.0]),
    RegMean(),
    CAT(penalty=0.1, rank=2),
    TSVC(),
    ModelStock(filter_wise=True),
    DELLA(density=0.5, epsilon=0.2),
    DELLA(density=0.5, epsilon=0.2, inner=TSVM()),
    DARE(density=0.5, inner=TSVM()),
    DARE(density=0.5, rescale="l1", inner=IsoC()),
    Breadcrumbs(density=0.5, gamma=0.1, inner=TSVM()),
]


def split_model(seed: int) -> dict[str, Tensor]:
    """A tensor an expert, as transformers writes them."""
    shapes = {"gate_proj": (INNER, OUTER), "up_proj": (INNER, OUTER), "down_proj": (OUTER, INNER)}
    state = {
        f"{PREFIX}.{e}.{name}.weight": draw(*shape, seed=100 * seed + 10 * e + i)
        for e in range(EXPERTS)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {"model.layers.0.self_attn.q_proj.weight": draw(OUTER, OUTER, seed=seed), **state}


def stack_model(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, as transformers 5 has it in memory."""

    def list_members(name: str) -> list[Tensor]:
        return [state[f"{PREFIX}.{e}.{name}.weight"] for e in range(EXPERTS)]

    pairs = zip(list_members("gate_proj"), list_members("up_proj"), strict=True)
    stacked = {
        "gate_up_proj": torch.stack([torch.cat(pair) for pair in pairs]),
        "down_proj": torch.stack(list_members("down_proj")),
    }
    others = {name: value for name, value in state.items() if not name.startswith(PREFIX)}
    return others | {f"{PREFIX}.{name}": value for name, value in stacked.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", BY_MATRIX, ids=repr)
def test_both_layouts_of_a_mixture_merge_to_the_same(method: Method, dtype: torch.dtype) -> None:
    """Bit for bit, but for a sum over the whole model that is rounded in another order."""
    base, *experts = ({n: v.to(dtype) for n, v in split_model(seed).items()} for seed in range(3))
    fishers = [{n: v.square() for n, v in split_model(seed).items()} for seed in (5, 6)]
    grams = [{n.removesuffix(".weight"): v.mT @ v for n, v in split_model(seed).items()} for seed in (7, 8)]
    split = {side_input: {"fisher": fishers, "gram": grams}[side_input] for side_input in method.side_inputs}
    stacked = {
        side_input: {"fisher": [stack_model(f) for f in fishers], "gram": grams}[side_input]
        for side_input in method.side_inputs
    }
    notes: dict = {}
    stacked_notes: dict = {}
    wanted = merge_state_dicts(base, experts, method, statistics=split, notes=notes)
    merged = merge_state_dicts(
        stack_model(base), [stack_model(e) for e in experts], method, statistics=stacked, notes=stacked_notes
    )
    summed = getattr(method, "normalize", "none") != "none"
    for name, value in stack_model(wanted).items():
        assert measure_error(merged[name], value) < 1e-12 if summed else torch.equal(merged[name], value), name
    assert stacked_notes.keys() == notes.keys()
    assert summed or stacked_notes == notes
    down = f"{PREFIX}.down_proj"
    mean = stack_model(merge_state_dicts(base, experts, TaskArithmetic(coefficient=0.5)))[down]
    assert measure_error(merged[down], mean) > 1e-3


@pytest.mark.parametrize("method", [Fisher(), DARE(density=0.5), TaskArithmetic()], ids=repr)
def test_entry_by_entry_the_layout_does_not_matter(method: Method) -> None:
    """But for the masks of chance, which are drawn by a tensor's name."""
    base, *experts = (split_model(seed) for seed in range(3))
    fishers = [{n: v.square() for n, v in split_model(seed).items()} for seed in (5, 6)]
    split, stacked = (
        {"fisher": f} if method.side_inputs else {} for f in (fishers, [stack_model(f) for f in fishers])
    )
    wanted = stack_model(merge_state_dicts(base, experts, method, statistics=split))
    merged = merge_state_dicts(stack_model(base), [stack_model(e) for e in experts], method, statistics=stacked)
    same = [torch.equal(merged[name], value) for name, value in wanted.items()]
    assert all(same) != isinstance(method, DARE)


def test_an_accelerator_factorizes_some_members_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the CPU is treated as one: parts of one, two and three matrices."""
    base, *experts = (stack_model(split_model(seed)) for seed in range(3))
    wanted = merge_state_dicts(base, experts, TSVM())
    for room in (1, 2, 3):
        monkeypatch.setattr(stream, "count_members", lambda reader, name, room=room: room)
        merged = merge_state_dicts(base, experts, TSVM())
        assert all(measure_error(merged[name], value) < 1e-12 for name, value in wanted.items())


def test_members_are_weighed_as_their_stack_is() -> None:
    base, *experts = (stack_model(split_model(seed)) for seed in range(3))
    patterns = [{"*.down_proj": 0.5}, 1.0]
    merged = merge_state_dicts(base, experts, TSVM(weights=patterns))
    plain = merge_state_dicts(base, experts, TSVM())
    halved = merge_state_dicts(base, experts, TSVM(weights=[0.5, 1.0]))
    assert torch.equal(merged[f"{PREFIX}.down_proj"], halved[f"{PREFIX}.down_proj"])
    assert torch.equal(merged[f"{PREFIX}.gate_up_proj"], plain[f"{PREFIX}.gate_up_proj"])


@pytest.mark.parametrize(
    "method", [IsoCTS(common=0.4), WUDI(lr=1e-3, steps=5), DOGE(steps=5), RegMean(), TSVM()], ids=repr
)
def test_stacks_of_transposed_matrices_merge_as_upright_ones(method: Method) -> None:
    """`[E, in, out]` and their biases, as gpt-oss has them; the fused projection is one matrix there."""

    def make_model(seed: int, transposed: bool) -> dict[str, Tensor]:
        up, down = draw(EXPERTS, 2 * INNER, OUTER, seed=seed), draw(EXPERTS, OUTER, INNER, seed=seed + 9)
        state = {"gate_up_proj": up.mT.contiguous(), "down_proj": down.mT.contiguous()}
        if not transposed:
            state = {f"{e}.{n}.weight": v[e].mT for n, v in state.items() for e in range(EXPERTS)}
        biases = {
            "gate_up_proj_bias": draw(EXPERTS, 2 * INNER, seed=seed),
            "down_proj_bias": draw(EXPERTS, OUTER, seed=seed),
        }
        return {f"{PREFIX}.{name}": value for name, value in (state | biases).items()}

    inputs = {"gate_up_proj": OUTER, "down_proj": INNER}
    grams = [
        {
            f"{PREFIX}.{e}.{n}": x.mT @ x
            for e in range(EXPERTS)
            for n, k in inputs.items()
            if (x := draw(20, k, seed=s + e)) is not None
        }
        for s in (1, 2)
    ]
    statistics = {"gram": grams} if method.side_inputs else {}
    merged, wanted = (
        merge_state_dicts(base, experts, method, statistics=statistics)
        for base, *experts in ([make_model(seed, layout) for seed in range(3)] for layout in (True, False))
    )
    for name, value in wanted.items():
        parts = name.removeprefix(f"{PREFIX}.").split(".")
        other = merged[f"{PREFIX}.{parts[1]}"][int(parts[0])].mT if parts[0].isdigit() else merged[name]
        assert measure_error(other, value) < 1e-12, name
    base, *experts = (make_model(seed, True) for seed in range(3))
    mean = merge_state_dicts(base, experts, TaskArithmetic(coefficient=0.5))
    bias = f"{PREFIX}.down_proj_bias"
    kept = isinstance(method, WUDI | DOGE)
    assert measure_error(merged[bias], base[bias] if kept else mean[bias]) < 1e-12


def test_stacks_are_known_by_name_and_shape() -> None:
    shapes = {
        "mlp.experts.gate_up_proj": (2, 12, 8),
        "mlp.experts.down_proj": (2, 8, 6),
        "mlp.shared_experts.up_proj": (1, 6, 8),
        "moe.input_linear.weight": (2, 12, 8),
        "mlp.switch_mlp.up_proj.weight": (2, 6, 8),
        "moe.gate_proj.weight": (2, 6, 8),
        "mlp.experts.0.down_proj.weight": (8, 6),
        "mlp.experts.0.conv.weight": (8, 6, 3),
        "encoder.conv1.weight": (8, 6, 3),
        "pos_embed": (1, 9, 8),
        "experts.router": (4, 8),
    }
    stacks = find_stacks(shapes)
    assert list(stacks) == list(shapes)[:6]
    members = ("mlp.experts.0.down_proj.weight", "mlp.experts.1.down_proj.weight")
    assert stacks["mlp.experts.down_proj"] == Stack(members, (8, 6))
    assert stacks["mlp.experts.gate_up_proj"].shape == (6, 8)
    assert stacks["mlp.experts.gate_up_proj"].members[1] == "mlp.experts.0.up_proj.weight"
    transposed = find_stacks(
        {"experts.gate_up_proj": (2, 8, 12), "experts.down_proj": (2, 6, 8), "experts.down_proj_bias": (2, 8)}
    )
    assert [stack.transposed for stack in transposed.values()] == [True, True, False]
    assert transposed["experts.gate_up_proj"].shape == (8, 12)
    assert transposed["experts.down_proj_bias"] == Stack(
        ("experts.0.down_proj.bias", "experts.1.down_proj.bias"), (8,)
    )


def test_layouts_of_other_projections_are_recognized_by_inputs_and_outputs() -> None:
    """GraniteMoE's, JetMoe's attention, Aria's, and DBRX's two dimensions."""
    gated = find_stacks({"moe.input_linear.weight": (2, 12, 8), "moe.output_linear.weight": (2, 8, 6)})
    assert gated["moe.input_linear.weight"].members[:2] == ("moe.0.gate_proj.weight", "moe.0.up_proj.weight")
    assert gated["moe.output_linear.weight"].members[1] == "moe.1.down_proj.weight"
    assert not any(stack.transposed for stack in gated.values())
    plain = find_stacks({"experts.input_linear.weight": (2, 8, 8), "experts.output_linear.weight": (2, 8, 8)})
    assert plain["experts.input_linear.weight"].shape == (8, 8)
    aria = find_stacks({"experts.fc1.weight": (2, 8, 12), "experts.fc2.weight": (2, 6, 8)})
    assert [(s.shape, s.transposed) for s in aria.values()] == [((8, 12), True), ((6, 8), True)]
    dbrx = {f"ffn.experts.mlp.{name}": (12, 8) for name in ("w1", "v1", "w2")}
    assert find_stacks(dbrx) == {}
    stacks = find_stacks(dbrx | {"ffn.router.layer.weight": (2, 8)})
    assert [(s.members[1], s.shape, s.transposed) for s in stacks.values()] == [
        (f"ffn.experts.1.{name}.weight", (6, 8), name == "w2") for name in ("w1", "w3", "w2")
    ]


def test_a_layout_is_known_where_its_other_half_is_not_merged() -> None:
    shapes = {f"{PREFIX}.gate_up_proj": (2, 8, 12), f"{PREFIX}.down_proj": (2, 6, 8)}
    base, expert = ({name: draw(*shape, seed=seed) for name, shape in shapes.items()} for seed in (1, 2))
    whole, part = (merge_state_dicts(base, [expert], IsoC(), exclude=e) for e in ((), ["*.down_proj"]))
    assert torch.equal(whole[f"{PREFIX}.gate_up_proj"], part[f"{PREFIX}.gate_up_proj"])


@pytest.mark.parametrize(
    ("method", "phrases"),
    [
        (TSVM(), ["1 matrices, and of 2 stacks 9 of a mixture's experts", "1 other tensors: the mean"]),
        (WUDI(), ["1 matrices, and of 2 stacks 9 of a mixture's experts", "1 other tensors: the base"]),
        (RegMean(), ["2 stacks of a mixture's experts: matrix by matrix"]),
        (TaskArithmetic(), ["2 stacks of a mixture's experts: each as one tensor"]),
        (DARE(inner=TSVM()), ["2 stacks of a mixture's experts: matrix by matrix"]),
    ],
    ids=repr,
)
def test_what_becomes_of_stacks_and_of_what_is_no_matrix_is_said(method: Method, phrases: list[str]) -> None:
    state = stack_model(split_model(0)) | {"conv.weight": draw(4, 3, 2, 2)}
    lines = explain_shapes(method, {name: tuple(value.shape) for name, value in state.items()})
    assert len(lines) == len(phrases)
    assert all(part in line for part, line in zip(phrases, lines, strict=True))
    assert explain_shapes(TaskArithmetic(), {"w": (3, 4)}) == []


def test_factors_of_stacks_are_refused() -> None:
    base, expert = (stack_model(split_model(seed)) for seed in range(2))
    with pytest.raises(InputError, match="down_proj"):
        merge_factors(base, [expert], TSVM())
    specs, _ = merge_factors(base, [expert], TSVM(), exclude=["*.experts.*"])
    assert set(specs) == {
        f"model.layers.0.self_attn.q_proj.weight.{part}" for part in ("u", "v", "coordinates")
    }
