"""Every method equals the outputs of the original implementations.

Tolerances are relative Frobenius norms per tensor on the stored quantity. `experiments/originals` makes
outputs.
"""

from functools import partial

import pytest
import torch
from merging.conftest import measure_error, to_dtype

from mergekit_lab.merging import (
    DARE,
    DOGE,
    PCB,
    TIES,
    TSVM,
    WUDI,
    EpiMer,
    Fisher,
    IsoC,
    IsoCTS,
    LiNeS,
    Method,
    RegMean,
    TaskArithmetic,
    WeightAverage,
    dropping,
    merge_state_dicts,
)
from mergekit_lab.merging.contract import Site

F32, F64 = torch.float32, torch.float64
EPIMER = partial(EpiMer, rank=2, normalize="none")

CASES = [
    ("average_T4", WeightAverage(), F32, 1e-6),
    ("task_arithmetic_l0.3_T4", TaskArithmetic(coefficient=0.3), F32, 1e-6),
    ("task_arithmetic_orig_l0.3_T4", TaskArithmetic(coefficient=0.3), F32, 1e-6),
    ("ties_orig_k20_dis-mean_T4", TIES(density=0.2), F32, 1e-6),
    ("ties_mergelm_mask0.8_exactdelta_T4", TIES(density=0.2, preset="mergelm"), F32, 1e-6),
    (
        "ties_fusionbench_k20_sum_T4",
        TIES(density=0.2, preset="sum", coefficient=1.0, count_buffers=True),
        F32,
        1e-6,
    ),
    ("ties_mergekit_d0.2_normalize_sum_T4", TIES(density=0.2, preset="mergekit"), F32, 1e-6),
    (
        "ties_mergekit_d0.2_nonormalize_sum_T4",
        TIES(density=0.2, preset="mergekit", aggregator="sum"),
        F32,
        1e-6,
    ),
    (
        "ties_mergekit_d0.2_normalize_count_T4",
        TIES(density=0.2, preset="mergekit", election="frequency"),
        F32,
        1e-6,
    ),
    ("ties_peft_d0.2_total_T4", TIES(density=0.2, preset="peft"), F32, 1e-6),
    ("ties_peft_d0.2_frequency_T4", TIES(density=0.2, preset="peft", election="frequency"), F32, 1e-6),
    ("tsvm_orig_f32_T4", TSVM(), F32, 2e-5),
    ("tsvm_orig_f64_T4", TSVM(), F64, 1e-10),
    ("tsvm_proto_k2_f64_T4", TSVM(rank=2), F64, 1e-10),
    ("epimer_tagged_k2_eps1e-08_T4", EPIMER(), F64, 1e-10),
    ("epimer_tagged_k2_eps1e-12_T4", EPIMER(floor=1e-12), F64, 1e-10),
    ("epimer_full_k2_eps1e-08_T4", EPIMER(coordinates="full"), F64, 1e-10),
    ("epimer_own_k2_eps1e-08_T4", EPIMER(coordinates="own"), F64, 1e-10),
    ("epimer_tagged_kauto_eps1e-08_T4", EPIMER(rank=None), F64, 1e-10),
    ("epimer_tagged_k2_eps1e-08_T4", EPIMER(), F32, 1e-4),
    ("epimer_tagged_kauto_eps1e-08_T4", EPIMER(rank=None), F32, 1e-4),
    ("iso_c_f32_T4", IsoC(), F32, 2e-5),
    ("iso_c_f64_T4", IsoC(), F64, 1e-10),
    ("iso_cts_f32_T4", IsoCTS(), F32, 2e-5),
    ("iso_cts_f64_T4", IsoCTS(), F64, 1e-10),
    ("wudi_iter300_f32_T4", WUDI(), F32, 1e-6),
    ("wudi_iter300_f64_T4", WUDI(), F64, 1e-6),
    ("wudi_fusionbench_iter300_f64_T4", WUDI(all_matrices=True), F64, 1e-6),
    ("pcb_ratio0.1_T4", PCB(density=0.1), F32, 1e-6),
    ("pcb_ratio0.6_T4", PCB(density=0.6), F32, 1e-6),
    ("ties_paper_max_d0.2_T4", TIES(density=0.2, aggregator="max"), F32, 1e-6),
    ("emr_shared_T4", TIES(density=1.0, aggregator="max"), F32, 1e-6),
    ("doge_T4", DOGE(), F64, 1e-6),
    ("doge_size0.3_density0.6_subspace2_T4", DOGE(size=0.3, density=0.6, subspace=2), F64, 1e-6),
    ("lines_sum_beta0.5_T4", LiNeS(slope=0.5, inner=TaskArithmetic(coefficient=1.0)), F32, 1e-6),
    ("regmean_mergelm_ratio1_T4", RegMean(), F64, 1e-6),
    ("regmean_mergelm_ratio0.9_T4", RegMean(ratio=0.9), F64, 1e-6),
    *(
        (
            f"fisher_matena_{n}_{f}_floor1e-6_T4",
            Fisher(normalize="norm" if n == "norm" else "none", favor_target=f == "favor"),
            F32,
            1e-6,
        )
        for n in ("norm", "nonorm")
        for f in ("favor", "nofavor")
    ),
    *(
        (
            f"fisher_mergelm_{n}_eps{e}_T4",
            Fisher(preset="mergelm", normalize="norm" if n == "norm" else "none", floor=float(e)),
            F32,
            1e-6,
        )
        for n in ("norm", "nonorm")
        for e in ("0", "1e-06", "1e-10")
    ),
]


@pytest.mark.parametrize(
    ("name", "method", "dtype", "tolerance"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_equals_the_original_implementation(golden, name: str, method: Method, dtype, tolerance: float) -> None:
    wanted = golden.load_output(name)
    names = [n for n in golden.base if n in wanted or not golden.base[n].is_floating_point()]
    if not name.startswith("fisher_mergelm"):
        names = list(golden.base)
    base, *experts = (to_dtype({n: state[n] for n in names}, dtype) for state in (golden.base, *golden.experts))
    fishers = [to_dtype({n: f[n] for n in names if n in f}, dtype) for f in golden.fishers]
    statistics = {
        side_input: {"fisher": fishers, "gram": golden.grams}[side_input] for side_input in method.side_inputs
    }

    merged = merge_state_dicts(base, experts, method, statistics=statistics, dtype=F64)

    assert wanted.keys() <= merged.keys()
    is_delta = not name.startswith(("average", "task_arithmetic", "fisher", "ties_mergekit", "regmean"))
    errors = {
        n: measure_error(merged[n] - base[n].double() if is_delta else merged[n], value)
        for n, value in wanted.items()
    }
    assert max(errors.values()) <= tolerance, {n: e for n, e in errors.items() if e > tolerance}


def test_wudi_leaves_what_the_original_does_not_write_at_the_base(golden) -> None:
    merged = merge_state_dicts(golden.base, golden.experts, WUDI(steps=1))
    kept = merged.keys() - golden.load_output("wudi_iter300_f32_T4").keys()
    assert len(kept) == len(golden.base) - 8
    assert all(torch.equal(merged[n], golden.base[n]) for n in kept)


@pytest.mark.parametrize("name", ["tagged_k2", "full_k2", "own_k2", "tagged_kauto"])
def test_epimer_reports_the_gain_of_the_original_prototype(golden, name: str) -> None:
    eta = ETA[name]
    coordinates, rank = name.split("_k")
    notes: dict = {}
    base, *experts = (to_dtype(state, F64) for state in (golden.base, *golden.experts))
    method = EPIMER(coordinates=coordinates, rank=None if rank == "auto" else int(rank))
    merge_state_dicts(base, experts, method, fishers=golden.fishers, notes=notes)
    for tensor, value in eta.items():
        assert notes[tensor]["eta"] == pytest.approx(value, rel=1e-8)


ETA = {
    "tagged_k2": {"odd.prime.weight": 5.18730658692959e-09, "visual.proj": 1.7533041446610357e-09},
    "full_k2": {"odd.prime.weight": 1.2054875623248184e-09, "visual.proj": 2.2244983115901496e-10},
    "own_k2": {"odd.prime.weight": 2.4413899425027935e-09, "visual.proj": 7.71213890702831e-10},
    "tagged_kauto": {"odd.prime.weight": 1.1725476348711636e-08, "visual.proj": 1.1393568475201316e-08},
}


@pytest.mark.parametrize(
    ("variant", "method", "cases"),
    [
        ("ties_orig.dis-mean", TIES(), ("A", "B", "C", "C20")),
        ("ties_orig.dis-sum", TIES(aggregator="sum"), ("A", "B", "C", "C20")),
        ("ties_orig.dis-max", TIES(aggregator="max"), ("A", "B", "C", "C20")),
        (
            "fusionbench.mean",
            TIES(preset="sum", coefficient=1.0, aggregator="mean"),
            ("A", "B", "C", "C20"),
        ),
        ("mergelm.dis-mean", TIES(preset="mergelm"), ("A", "B", "C", "C20")),
        ("fusionbench.sum", TIES(preset="sum", coefficient=1.0), ("A", "B", "C", "C20")),
        ("mergekit.sum.norm", TIES(preset="mergekit"), ("A", "B", "C", "C20")),
        ("mergekit.sum.nonorm", TIES(preset="mergekit", aggregator="sum"), ("A", "B", "C", "C20")),
        ("mergekit.count.norm", TIES(preset="mergekit", election="frequency"), ("A", "B", "C", "C20")),
        (
            "mergekit.count.nonorm",
            TIES(preset="mergekit", election="frequency", aggregator="sum"),
            ("A", "B", "C", "C20"),
        ),
        ("peft.total", TIES(preset="peft"), ("A", "B")),
        ("peft.frequency", TIES(preset="peft", election="frequency"), ("A", "B")),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_ties_corner_cases_equal_the_original_bit_for_bit(golden, variant: str, method: TIES, cases) -> None:
    from dataclasses import replace

    densities = {"A": 0.5, "B": 0.5, "C": 0.3, "C20": 0.2}
    vectors = golden.load_output("edge_ties")
    for case in cases:
        deltas = vectors[f"{case}.input"]
        base = {"w": torch.zeros(deltas.shape[1])}
        experts = [{"w": delta} for delta in deltas]
        merged = merge_state_dicts(base, experts, replace(method, density=densities[case]))
        assert torch.equal(merged["w"], vectors[f"{case}.{variant}"] + 0.0), case


@pytest.mark.parametrize(
    ("masks", "output", "inner"),
    [
        ("dare_mergelm_p0.9_masks_T4", "dare_mergelm_p0.9_average_T4", WeightAverage()),
        ("dare_mergelm_p0.9_masks_T4", "dare_mergelm_p0.9_ta0.3_T4", TaskArithmetic(coefficient=0.3)),
        (
            "dare_fusionbench_p0.9_masks_T4",
            "dare_fusionbench_p0.9_sumdelta_T4",
            TaskArithmetic(coefficient=1.0),
        ),
    ],
)
def test_dare_with_the_saved_masks_equals_the_original(golden, masks: str, output: str, inner: Method) -> None:
    keep, wanted = golden.load_output(masks), golden.load_output(output)
    for name, value in wanted.items():
        deltas = torch.stack(
            [
                ((expert[name] - golden.base[name]) * mask / 0.1).reshape(-1)
                for expert, mask in zip(
                    golden.experts, (keep[f"keep.{t}.{name}"] for t in range(4)), strict=True
                )
            ]
        )
        site = Site(("0", "1", "2", "3"), torch.tensor(inner.weigh_experts(["0", "1", "2", "3"])))
        delta = inner.merge(name, golden.base[name], deltas, site) * inner.scale
        merged = delta.view_as(value) + (0 if "delta" in output else golden.base[name])
        assert measure_error(merged, value) <= 1e-6, name


def test_dare_with_l1_rescaling_equals_mergekit(golden) -> None:
    wanted = golden.load_output("dare_mergekit_d0.1_linear_l1rescale_T4")
    torch.manual_seed(0)
    for name, value in golden.base.items():
        if not value.is_floating_point() or name not in wanted:
            continue
        total = torch.zeros_like(value)
        for expert in golden.experts:
            keep = torch.bernoulli(torch.full(value.shape, 0.1))
            total += 0.25 * dropping.restore_norm(expert[name] - value, keep)
        assert measure_error(value + total, wanted[name]) <= 1e-6, name


def test_dare_uses_that_rescaling(golden) -> None:
    """The field reaches the step that the test above pins."""
    base, expert = golden.base, golden.experts[0]
    merged = merge_state_dicts(
        base, [expert], DARE(rescale="l1", inner=TaskArithmetic(coefficient=1.0)), dtype=F64
    )
    for name in ("token_embedding.weight", "visual.proj"):
        before, after = expert[name].double() - base[name].double(), merged[name] - base[name].double()
        assert 0.05 < float((after != 0).double().mean()) < 0.15
        assert float(after.abs().sum()) == pytest.approx(float(before.abs().sum()), rel=1e-5)
