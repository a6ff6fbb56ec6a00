"""What MergOPT's moves cost by how many entries are drawn at a time, on a GPU. See README.md.

    python experiments/optimizer_cost/draws.py experiments/optimizer_cost/results/draws_h200.json

A move copies θ, draws Laplace noise, adds it, and puts θ back. Small parts would stay in the card's cache
between being drawn and being added; `fused` copies each part just before it is added to, while it is there.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench import LlamaProblem, Vision
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

RATE = 2000.0


def measure(move: Callable[[], None], count: int = 10) -> dict[str, float]:
    """Milliseconds a call: of kernels at work, and from the first one to the last."""
    for _ in range(3):
        move()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        move()
    end.record()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(count):
            move()
        torch.cuda.synchronize()
    events = trace.key_averages()
    kernels = sum(e.device_time_total for e in events) / count / 1e3
    return {
        "kernel_ms": round(kernels, 4),
        "wall_ms": round(begin.elapsed_time(end) / count, 4),
        "kernels": sum(e.count for e in events) / count,
    }


def list_parts(tensors: list[Tensor], entries: int) -> list[list[Tensor]]:
    """Views of all tensors, in groups of at most so many entries."""
    groups: list[list[Tensor]] = [[]]
    for view in (v for t in tensors for v in t.view(-1).split(entries)):
        if groups[-1] and sum(v.numel() for v in groups[-1]) + view.numel() > entries:
            groups.append([])
        groups[-1].append(view)
    return groups


def make_mover(theta: list[Tensor], entries: int, fused: bool) -> Callable[[], None]:
    copies = [torch.empty_like(t) for t in theta]
    generator = torch.Generator(theta[0].device).manual_seed(0)
    pairs = list(zip(list_parts(theta, entries), list_parts(copies, entries), strict=True))
    one, other = (torch.empty(entries, device=theta[0].device) for _ in range(2))

    def move() -> None:
        if not fused:
            torch._foreach_copy_(copies, theta)
        for moved, kept in pairs:
            if fused:
                torch._foreach_copy_(kept, moved)
            sizes = [v.numel() for v in moved]
            draws, more = one[: sum(sizes)], other[: sum(sizes)]
            draws.exponential_(RATE, generator=generator)
            more.exponential_(RATE, generator=generator)
            torch._foreach_add_(moved, list(draws.sub_(more).split(sizes)))
        torch._foreach_copy_(theta, copies)

    return move


@torch.no_grad()
def main() -> None:
    timings = {}
    device = torch.device("cuda")
    for name, problem in (("vision", Vision), ("language", LlamaProblem)):
        theta = [p.detach() for p in problem(device, False).make_model().to(device).parameters()]
        for power in (24, 23, 22, 21, 20, 19):
            for fused in (False, True):
                label = f"{name} 2**{power} {'fused' if fused else ''}".strip()
                timings[label] = measure(make_mover(theta, 2**power, fused))
                print(label, timings[label], flush=True)
    machine = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    Path(sys.argv[1]).write_text(json.dumps({**machine, "rows": timings}, indent=1) + "\n")


if __name__ == "__main__":
    main()
