"""Methods that make a model for every task: stored in parts, of which the authors' model of each comes back."""

import pytest
import torch
from merging.conftest import measure_error

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import LowRank
from mergekit_lab.merging import EMR, TIES, TSVC, blocks, merge_state_dicts

NAMES = ["0", "1", "2", "3"]


def store(golden, method, folder, dtype=None):
    experts = dict(zip(NAMES, golden.experts, strict=True))
    return mergekit_lab.merge(
        golden.base, experts, folder, method, format="per_task", device="cpu", dtype=dtype
    )


def load_deltas(folder, base, task):
    """What a task's model adds to the base."""
    model = LowRank(folder, open_checkpoint(base), "parts", [task])
    return {n: model[n].double() - base[n].double() for n in base if base[n].is_floating_point()}


@pytest.mark.parametrize("block", [1 << 18, 64])
def test_emr_is_the_original(golden, block, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "CPU_BLOCK", block)
    wanted = golden.load_output("emr_tasks_T4")
    folder = store(golden, EMR(preset="authors"), tmp_path / "parts", dtype="float64")
    for name, delta in load_deltas(folder, golden.base, "3").items():
        assert measure_error(delta, wanted[f"3.{name}"]) <= 1e-6, name
    out = mergekit_lab.expand(folder, golden.base, tmp_path / "3", tasks=["3"])
    model = LowRank(folder, open_checkpoint(golden.base), "parts", ["3"])
    assert all(torch.equal(value, model[name]) for name, value in open_checkpoint(out).items())
    whole = sum(p.stat().st_size for p in out.glob("*.safetensors")) / 2  # in float64
    parts = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert parts < 1.6 * whole


def test_emrs_rescalers_are_the_papers(golden, tmp_path) -> None:
    """`Σ|δ_t| / Σ|M_t ∘ τ|` over the whole model: a task's share is as large as its task vector."""
    folder = store(golden, EMR(), tmp_path / "parts", dtype="float64")
    shares = {task: load_deltas(folder, golden.base, task) for task in NAMES}
    for task, expert in zip(NAMES, golden.experts, strict=True):
        own = sum(float((expert[n].double() - golden.base[n]).abs().sum()) for n in shares[task])
        assert sum(float(d.abs().sum()) for d in shares[task].values()) == pytest.approx(own, rel=1e-6)
    shared = merge_state_dicts(golden.base, golden.experts, EMR())
    ties = merge_state_dicts(golden.base, golden.experts, TIES(density=1.0, aggregator="max"))
    alone = LowRank(folder, open_checkpoint(golden.base), "parts")
    for name in shares["0"]:
        assert measure_error(shared[name], ties[name]) <= 1e-6, name
        assert measure_error(alone[name], shared[name]) <= 1e-6, name


def test_tsvc_is_the_original(golden, tmp_path) -> None:
    wanted = golden.load_output("tsvc_tasks_T4")
    folder = store(golden, TSVC(), tmp_path / "parts", dtype="float64")
    for name, delta in load_deltas(folder, golden.base, "2").items():
        assert measure_error(delta, wanted[f"2.{name}"]) <= 2e-6, name
    dense = merge_state_dicts(golden.base, golden.experts, TSVC(), dtype=torch.float64)
    shares = [load_deltas(folder, golden.base, task) for task in ("0", "1", "3")]
    for name, delta in load_deltas(folder, golden.base, "2").items():
        total = delta + sum(share[name] for share in shares)
        assert measure_error(dense[name] - golden.base[name], total) <= 1e-5, name


def test_what_is_not_by_task_is_refused(golden, tmp_path) -> None:
    with pytest.raises(InputError, match="TIES makes one model"):
        store(golden, TIES(), tmp_path / "none")
    with pytest.raises(InputError, match=r"EMR.*low-rank"):
        mergekit_lab.merge(golden.base, golden.experts, tmp_path / "none", EMR(), format="low_rank")
    folder = store(golden, EMR(), tmp_path / "parts")
    with pytest.raises(InputError, match="one model per task"):
        mergekit_lab.expand(folder, golden.base, tmp_path / "two", tasks=["0", "1"])
