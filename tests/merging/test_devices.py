"""A merge over several devices gives the bits of one: here they are all the CPU."""

import threading
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mergekit_lab.merging import DARE, TIES, TSVM, blocks, jobs, merge_state_dicts, stream
from mergekit_lab.merging.inputs import open_inputs
from mergekit_lab.merging.jobs import plan_jobs


def make_models(experts: int = 3) -> tuple[dict, list[dict]]:
    """Tensors of several sizes, one of them empty, with many equal magnitudes: thresholds fall on ties."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (40, 50), "empty": (0, 4), "mlp": (30, 20), "norm": (20,), "scale": ()}
    base = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    steps = [
        {n: torch.randint(-3, 4, s, generator=generator) / 8 for n, s in shapes.items()} for _ in range(experts)
    ]
    return base, [{n: base[n] + step[n] for n in base} for step in steps]


@pytest.mark.parametrize("preset", ["paper", "mergelm", "sum"])
@pytest.mark.parametrize("dropped", [False, True], ids=["ties", "dare+ties"])
def test_a_survey_that_devices_share_finds_what_one_finds(preset: str, dropped: bool, monkeypatch) -> None:
    method = TIES(preset=preset, density=0.3)
    method = DARE(density=0.5, inner=method) if dropped else method
    base, experts = make_models()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    seen, count = [], blocks.Reader.divide
    monkeypatch.setattr(blocks.Reader, "divide", lambda self: seen.append(count(self)) or seen[-1])
    one = merge_state_dicts(base, experts, method)
    assert [len(shares) for shares in seen] == [1] * len(seen)
    seen.clear()
    several = merge_state_dicts(base, experts, method, device=["cpu", "cpu", "cpu"])
    assert [len(shares) for shares in seen] == [3] * len(seen) != []
    assert all(torch.equal(one[name], several[name]) for name in base)


def test_every_tensor_is_in_one_share_and_none_without_entries_is_a_share() -> None:
    base, experts = make_models()
    inputs = open_inputs(base, experts, TIES())
    cpu = torch.device("cpu")
    shares = blocks.Reader(inputs, TIES(), cpu, sharing=(cpu,) * 9).divide()
    assert sorted(name for share in shares for name in share.names) == sorted(n for n in base if n != "empty")
    two = blocks.Reader(inputs, TIES(), cpu, sharing=(cpu,) * 2).divide()
    assert [two[0].names[0], two[1].names[0]] == ["embed", "mlp"]


@dataclass(frozen=True, kw_only=True)
class WatchedTSVM(TSVM):
    """Factorizes the first stack when all tensors that `early` names have been read, and one at a time."""

    early: frozenset[str] = frozenset()

    def merge_matrices(self, deltas, sites) -> Tensor:
        assert working.acquire(blocking=False), "two stacks are factorized at once"
        try:
            assert all(get_event(name).wait(30) for name in self.early), "nothing is read meanwhile"
            return super().merge_matrices(deltas, sites)
        finally:
            working.release()


working = threading.Lock()
read: dict[str, threading.Event] = {}


def get_event(name: str) -> threading.Event:
    return read.setdefault(name, threading.Event())


@pytest.mark.parametrize("room", [1 << 30, 0], ids=["small", "large"])
def test_matrices_are_read_while_a_device_factorizes_others(room: int, monkeypatch) -> None:
    base, experts = make_models()
    expected = merge_state_dicts(base, experts, TSVM())
    read.clear()
    deltas = blocks.Reader.read_deltas

    def read_and_tell(self: blocks.Reader, name: str, origin: Tensor) -> Tensor:
        get_event(name).set()
        assert room or origin.dim() != 2 or not working.locked(), "a large one is read at a bad time"
        return deltas(self, name, origin)

    monkeypatch.setattr(blocks.Reader, "read_deltas", read_and_tell)
    monkeypatch.setattr(jobs, "count_workers", lambda reader: 2)
    monkeypatch.setattr(stream, "STACK_BYTES", room)
    method = WatchedTSVM(early=frozenset({"embed", "mlp"} if room else ()))
    merged = merge_state_dicts(base, experts, method)
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())


def test_an_accelerator_gets_stacks_of_one_shape_the_longest_first_and_the_rest_pooled(monkeypatch) -> None:
    """Jobs are planned from names and shapes alone, so this needs no GPU."""
    monkeypatch.setattr("mergekit_lab.merging.jobs.STACK_BYTES", 2 * 4 * 2 * 30 * 20)
    shapes = {"a.norm": (20,), "embed": (90, 20), "scale": ()}
    shapes |= {f"{n}.mlp": (30, 20) for n in range(5)} | {f"{n}.bias": (20,) for n in range(3)}
    base = {name: torch.zeros(shape) for name, shape in shapes.items()}
    inputs = open_inputs(base, [base, base], TSVM(), None, None, ())
    jobs = plan_jobs(blocks.Reader(inputs, TSVM(), torch.device("cuda")))
    assert sorted(name for job in jobs for name in job) == sorted(shapes)
    assert jobs[0] == ["embed"]
    assert [{shapes[name] for name in job} for job in jobs[1:-1]] == [{(30, 20)}] * 3
    assert [len(job) for job in jobs[1:-1]] == [2, 2, 1]
    assert jobs[-1] == ["a.norm", "scale", "0.bias", "1.bias", "2.bias"]
