"""What a merge of blocks costs on a CPU: passes over their entries, and the pages of results."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mergekit_lab.merging import TaskArithmetic, merge_state_dicts
from mergekit_lab.merging.transfers import allocate_result

_SMAPS = Path("/proc/self/smaps")
_FREE = {
    "data_ptr",
    "device",
    "dim",
    "empty",
    "narrow",
    "numel",
    "reshape",
    "stride",
    "tensor",
    "unbind",
    "view",
}
"""Functions that touch no entry of a block."""


class Passes(TorchFunctionMode):
    """Counts the functions that read or write entries."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in _FREE and not func.__name__.startswith("__"):
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_passes_six_times_over_a_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergekit_lab.merging.jobs.count_cores", lambda: 1)  # all in this thread
    monkeypatch.setattr("mergekit_lab.merging.blocks.CPU_BLOCK", 64)
    base, *experts = ({"w": torch.full((4, 64), float(n), dtype=dtype)} for n in range(4))
    with Passes() as passes:
        merged = merge_state_dicts(base, experts, TaskArithmetic(coefficient=0.5))
    assert torch.equal(merged["w"], torch.full((4, 64), 3.0, dtype=dtype))
    read = ["_foreach_copy_", "sub_"] if dtype == torch.bfloat16 else ["copy_", "sub", "sub", "sub"]
    assert passes.counts == Counter(4 * [*read, "matmul", "sum", "add_", "copy_"])


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no large pages here")
def test_results_are_in_large_pages() -> None:
    result = allocate_result((2048, 2048), torch.bfloat16, torch.device("cpu"))
    for area in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", _SMAPS.read_text())[1:]:
        first, last = (int(end, 16) for end in area.split()[0].split("-"))
        if first <= result.data_ptr() < last:
            assert " hg" in re.search(r"VmFlags:.*", area)[0]
            return
    raise AssertionError("the result is in no area of this process")
