"""What two processes do in tests/training/test_distributed.py; each writes what it saw to a file."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mergekit_lab.errors import InputError
from mergekit_lab.optim import ASAM, RWP, SAM, SSAMD, SSAMF, WASAM, MergOPT
from optim.problems import BASES, OPTIMIZERS, Problem

STEPS = 3
WORLD = 2
LOCAL_ASCENT: dict[str, Callable[..., Any]] = {
    "sam": partial(SAM, rho=0.3, sync_ascent=False),
    "asam": partial(ASAM, scaling="saft", sync_ascent=False),
    "wasam": partial(WASAM, steps=6, start=0, sync_ascent=False),
}
PER_RANK: dict[str, Callable[..., Any]] = {
    "mergopt": partial(MergOPT, scale=0.05, coefficients=(0.3, 0.7), per_rank=True),
    "mergopt-worst": partial(MergOPT, scale=0.05, coefficients=(0.3, 0.7), per_rank=True, worst_of=2),
}
SHARDED = [n for n in OPTIMIZERS if not n.startswith(("ssam", "rwp"))]
NEEDS_WHOLE: dict[str, Callable[..., Any]] = {
    "ssamf": SSAMF,
    "ssamd": partial(SSAMD, steps=5),
    "rwp": RWP,
    "mergopt per rank": partial(MergOPT, per_rank=True),
    "local ascent": partial(SAM, sync_ascent=False),
}


def make_flat_problem() -> Problem:
    """Without a 0-d parameter, which `fully_shard` does not take."""
    problem = Problem()
    problem.model.scale = nn.Parameter(problem.model.scale.detach().reshape(1))
    return problem


def share(problem: Problem, rank: int) -> None:
    rows = len(problem.x) // WORLD
    problem.x, problem.y = (t[rank * rows : (rank + 1) * rows] for t in (problem.x, problem.y))


def gather_whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: gather_whole(p.detach()) for name, p in model.named_parameters()}


def run(problem: Problem, model: nn.Module, optimizer: Any) -> dict[str, list[dict[str, Tensor]]]:
    """The weights after every step, and at every evaluation."""
    seen: list[dict[str, Tensor]] = []
    after = []

    def closure() -> Tensor:
        loss = nn.functional.cross_entropy(model(problem.x), problem.y)
        loss.backward()
        seen.append(gather_weights(problem.model))
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
        after.append(gather_weights(problem.model))
    return {"after": after, "seen": seen}


def run_parallel(make: Callable[..., Any], rank: int, attach: bool = False) -> dict[str, Any]:
    problem = Problem()
    share(problem, rank)
    model = DistributedDataParallel(problem.model)
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"])
    if attach:
        optimizer.attach(model)
    return run(problem, model, optimizer)


def run_sharded(make: Callable[..., Any], rank: int, mesh: Any) -> dict[str, Any]:
    problem = make_flat_problem()
    share(problem, rank)
    fully_shard(problem.model, mesh=mesh)
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"])
    return run(problem, problem.model, optimizer)


def run_sharded_without_closure(rank: int, mesh: Any) -> dict[str, Tensor]:
    problem = make_flat_problem()
    share(problem, rank)
    fully_shard(problem.model, mesh=mesh)
    optimizer = OPTIMIZERS["mergopt-laplace"](problem.model.named_parameters(), base=BASES["adamw"])
    optimizer.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(problem.model(problem.x), problem.y).backward()
        optimizer.step()
    optimizer.eval()
    return gather_weights(problem.model)


def catch_refusal(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except InputError as error:
        return str(error)
    return ""


def refuse_whole(make: Callable[..., Any], mesh: Any) -> str:
    problem = make_flat_problem()
    fully_shard(problem.model, mesh=mesh)
    return catch_refusal(lambda: make(problem.model.named_parameters(), base=BASES["sgd"]))


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=WORLD
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    weights = {
        "parallel": {name: run_parallel(make, rank) for name, make in OPTIMIZERS.items()},
        "local ascent": {name: run_parallel(make, rank, attach=True) for name, make in LOCAL_ASCENT.items()},
        "per rank": {name: run_parallel(make, rank) for name, make in PER_RANK.items()},
        "not attached": catch_refusal(lambda: run_parallel(LOCAL_ASCENT["sam"], rank)),
        "sharded": {name: run_sharded(OPTIMIZERS[name], rank, mesh) for name in SHARDED},
        "sharded without closure": run_sharded_without_closure(rank, mesh),
        "needs whole": {name: refuse_whole(make, mesh) for name, make in NEEDS_WHOLE.items()},
    }
    torch.save(weights, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
