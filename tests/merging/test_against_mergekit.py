"""The methods that mergekit published, against mergekit itself where it is installed."""

import pytest
import torch
from merging.conftest import measure_error
from torch import Tensor

from mergekit_lab.merging import (
    DELLA,
    RAM,
    SCE,
    SLERP,
    TIES,
    ArceeFusion,
    Breadcrumbs,
    Karcher,
    Method,
    ModelStock,
    MultiSLERP,
    NearSwap,
    NuSLERP,
    Passthrough,
    TaskArithmetic,
    merge_state_dicts,
)
from mergekit_lab.merging.contract import Segment
from mergekit_lab.merging.dropping import draw_uniform, make_counters

pytestmark = pytest.mark.beside
try:
    import mergekit.merge_methods as mergekit
except ImportError:
    pytestmark = [pytestmark, pytest.mark.skip(reason="mergekit is not installed: `make test-beside` has it")]

WEIGHTS = [0.5, 1.5, 0.7]
BY_EXPERT = {"0": 0.5, "1": 1.5, "2": 0.7}
ELECTING = TIES(preset="mergekit", density=1.0, weights=WEIGHTS)
LINEAR = TaskArithmetic(coefficient=1.0, weights=WEIGHTS)


def make_models() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (12, 7), "b.weight": (9, 16), "a.bias": (12,), "conv.weight": (4, 3, 2, 2)}
    base = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    return base, [
        {n: v + 0.1 * torch.randn(v.shape, generator=generator) for n, v in base.items()} for _ in range(3)
    ]


def merge_by_mergekit(method: str, base, experts, **parameters) -> dict[str, Tensor]:
    models = {"base": base} | {str(t): expert for t, expert in enumerate(experts)}
    return mergekit.merge_state_dicts(models, method, parameters=parameters, base="base")


def assert_same(merged: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert merged.keys() == wanted.keys()
    for name, value in wanted.items():
        assert measure_error(merged[name], value) <= 1e-6, name


@pytest.mark.parametrize(("density", "gamma"), [(0.3, 0.1), (0.5, 0.0), (0.95, 0.2), (1.0, 0.1)])
@pytest.mark.parametrize(("name", "inner"), [("breadcrumbs", LINEAR), ("breadcrumbs_ties", ELECTING)])
def test_breadcrumbs(name: str, inner: Method, density: float, gamma: float) -> None:
    base, experts = make_models()
    wanted = merge_by_mergekit(
        name,
        base,
        experts,
        weight=BY_EXPERT,
        density=density,
        gamma=gamma,
        normalize=inner is ELECTING,
    )
    assert_same(
        merge_state_dicts(base, experts, Breadcrumbs(density=density, gamma=gamma, inner=inner)), wanted
    )


@pytest.mark.parametrize(("name", "inner"), [("della_linear", LINEAR), ("della", ELECTING)])
def test_della_with_the_same_masks(name: str, inner: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    base, experts = make_models()
    del base["conv.weight"]  # ranks of kernels: see the head of della.py
    experts = [{n: v for n, v in expert.items() if n in base} for expert in experts]
    method = DELLA(density=0.6, epsilon=0.15, seed=5, rescale="l1", inner=inner)
    for tensor, value in base.items():
        chances = iter(
            [
                draw_uniform(make_counters(5, str(t), [Segment(tensor, 0, value.numel())]), value.device)
                for t in range(3)
            ]
        )

        def draw_mask(probabilities: Tensor, chances=chances) -> Tensor:
            keep = next(chances).view_as(probabilities) >= 1 - probabilities.double()
            return keep.to(probabilities.dtype)

        monkeypatch.setattr(torch, "bernoulli", draw_mask)
        wanted = merge_by_mergekit(
            name,
            {tensor: value},
            [{tensor: expert[tensor]} for expert in experts],
            **{
                "weight": BY_EXPERT,
                "density": 0.6,
                "epsilon": 0.15,
                "normalize": inner is ELECTING,
            },
        )
        assert next(chances, None) is None
        merged = merge_state_dicts({tensor: value}, [{tensor: e[tensor]} for e in experts], method)
        assert_same(merged, wanted)


@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
def test_slerp(t: float) -> None:
    base, (first, second, _) = make_models()
    wanted = mergekit.merge_state_dicts({"0": first, "1": second}, "slerp", parameters={"t": t}, base="0")
    assert_same(merge_state_dicts(base, [first, second], SLERP(t=t)), wanted)


def test_slerp_between_distant_models() -> None:
    base, (first, second, _) = make_models()
    second = {n: v.flip(0) for n, v in second.items()}
    wanted = mergekit.merge_state_dicts({"0": first, "1": second}, "slerp", parameters={"t": 0.3}, base="0")
    assert_same(merge_state_dicts(base, [first, second], SLERP(t=0.3)), wanted)


@pytest.mark.parametrize("filter_wise", [False, True])
@pytest.mark.parametrize("experts", [2, 3])
def test_model_stock(experts: int, filter_wise: bool) -> None:
    base, people = make_models()
    shared = {n: torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) for n, v in base.items()}
    people = [{n: v + 0.1 * shared[n] for n, v in expert.items()} for expert in people[:experts]]
    if filter_wise:  # rows of kernels: see the head of model_stock.py
        base, *people = ({n: v for n, v in state.items() if n != "conv.weight"} for state in (base, *people))
    wanted = merge_by_mergekit("model_stock", base, people, filter_wise=filter_wise)
    assert_same(merge_state_dicts(base, people, ModelStock(filter_wise=filter_wise)), wanted)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.25, 0.75], [0.5, -0.5]])
@pytest.mark.parametrize("along", ["tensor", "last", "first"])
@pytest.mark.parametrize("task_vectors", [False, True])
def test_nuslerp(task_vectors: bool, along: str, weights: list[float]) -> None:
    base, (first, second, _) = make_models()
    first["a.bias"], second["b.weight"] = (
        base["a.bias"],
        first["b.weight"] * 2,
    )  # one is 0, two parallel
    wanted = mergekit.merge_state_dicts(
        {"0": first, "1": second} | ({"base": base} if task_vectors else {}),
        "nuslerp",
        parameters={
            "weight": {"0": weights[0], "1": weights[1]},
            "nuslerp_flatten": along == "tensor",
            "nuslerp_row_wise": along == "first",
        },
        base="base" if task_vectors else None,
    )
    method = NuSLERP(along=along, task_vectors=task_vectors, weights=weights)
    assert_same(merge_state_dicts(base if task_vectors else first, [first, second], method), wanted)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("task_vectors", [False, True])
def test_multislerp(task_vectors: bool, normalize: bool) -> None:
    base, experts = make_models()
    parameters = {"weight": BY_EXPERT, "normalize_weights": normalize}
    models = {str(t): expert for t, expert in enumerate(experts)}
    if task_vectors:
        wanted = merge_by_mergekit("multislerp", base, experts, **parameters)
    else:
        wanted = mergekit.merge_state_dicts(models, "multislerp", parameters=parameters)
    method = MultiSLERP(weights=WEIGHTS, normalize=normalize, task_vectors=task_vectors)
    assert_same(merge_state_dicts(base if task_vectors else experts[0], experts, method), wanted)


@pytest.mark.parametrize(("steps", "spread"), [(1, 1.0), (10, 1.0), (10, 20.0)])
def test_karcher(steps: int, spread: float) -> None:
    base, experts = make_models()
    experts = [{n: base[n] + spread * (v - base[n]) for n, v in expert.items()} for expert in experts]
    experts[1]["a.bias"] = torch.zeros(12)  # no direction
    models = {str(t): expert for t, expert in enumerate(experts)}
    wanted = mergekit.merge_state_dicts(models, "karcher", parameters={"max_iter": steps})
    merged = merge_state_dicts(experts[0], experts, Karcher(steps=steps))
    for name, value in wanted.items():  # theirs stops by float32 arcs
        assert measure_error(merged[name], value) <= 1e-5, name


@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_sce(size: float, density: float) -> None:
    base, experts = make_models()
    experts = [{n: base[n] + size * (v - base[n]) for n, v in expert.items()} for expert in experts]
    wanted = merge_by_mergekit("sce", base, experts, select_topk=density)
    assert_same(merge_state_dicts(base, experts, SCE(density=density, preset="mergekit")), wanted)


@pytest.mark.parametrize("epsilon", [1e-5, 0.15])
@pytest.mark.parametrize("boost", [0.0, 0.3])
def test_ram(boost: float, epsilon: float) -> None:
    base, experts = make_models()
    parameters = {"epsilon": epsilon} | ({"r": boost, "alpha": 0.4} if boost else {})
    wanted = merge_by_mergekit("ramplus_tl" if boost else "ram", base, experts, **parameters)
    method = RAM(epsilon=epsilon, boost=boost, bound=0.4, scope="tensor")
    assert_same(merge_state_dicts(base, experts, method), wanted)


@pytest.mark.parametrize("t", [0.0, 0.05, 10.0])
def test_nearswap(t: float) -> None:
    base, (other, *_) = make_models()
    other["a.bias"][0] = base["a.bias"][0]
    wanted = merge_by_mergekit("nearswap", base, [other], t=t)
    assert_same(merge_state_dicts(base, [base, other], NearSwap(t=t)), wanted)


def test_arcee_fusion() -> None:
    base, (other, *_) = make_models()
    generator = torch.Generator().manual_seed(0)
    for number in range(200):  # an importance next to the bound must round as mergekit's does
        base[f"{number}.weight"] = 0.05 * torch.randn(16, 24, generator=generator)
        other[f"{number}.weight"] = base[f"{number}.weight"] + 0.01 * torch.randn(16, 24, generator=generator)
    wanted = merge_by_mergekit("arcee_fusion", base, [other])
    assert_same(merge_state_dicts(base, [base, other], ArceeFusion()), wanted)


@pytest.mark.parametrize("factor", [None, 0.5, -2.0])
def test_passthrough(factor: float | None) -> None:
    _, (expert, *_) = make_models()
    wanted = mergekit.merge_state_dicts({"0": expert}, "passthrough", parameters={"scale": factor})
    merged = merge_state_dicts(expert, [expert], Passthrough(factor=1.0 if factor is None else factor))
    assert all(torch.equal(merged[n], v) or factor for n, v in wanted.items())
    assert_same(merged, wanted)
