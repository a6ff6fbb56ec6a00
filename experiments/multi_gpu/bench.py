"""Several GPUs of one host: sweeps, data-parallel and sharded training, merges. See README.md.

    python experiments/multi_gpu/bench.py PART --out FOLDER             one of: sweep run ddp fsdp merge
    python experiments/multi_gpu/bench.py PART --out FOLDER --dry       tiny shapes, two CPU processes (gloo)

Every part appends rows to FOLDER/PART_LABEL.json as they are measured, and skips the rows that are there.
`--devices 2 3` picks cards; a part measures on as many as are named.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from mergekit_lab.optim import ASAM, SAM, MergOPT
from mergekit_lab.stages.workers import together

ADAMW = partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.1, fused=True)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda named: ADAMW([p for _, p in named]),
    "sam": partial(SAM, base=ADAMW),
    "asam": partial(ASAM, base=ADAMW, scaling="saft"),
    "mergopt": partial(MergOPT, base=ADAMW),
}


class Rows:
    """The rows of one part on one number of cards; each is measured once."""

    def __init__(self, given: argparse.Namespace) -> None:
        label = given.label or f"{len(given.devices)}gpu"
        self.file = given.out / f"{given.part}_{label}.json"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self.content = json.loads(self.file.read_text())
            return
        card = "cpu" if given.dry else torch.cuda.get_device_name(0)
        self.content = {
            "part": given.part,
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "date": datetime.now().isoformat(timespec="seconds"),
            "card": card,
            "cards": len(given.devices),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "rows": [],
        }

    def add(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        if any(row["name"] == name for row in self.content["rows"]):
            return
        begun = time.perf_counter()
        try:
            found = measure()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        row = {"name": name, **found, "whole_seconds": round(time.perf_counter() - begun, 2)}
        print(json.dumps(row), flush=True)
        self.content["rows"].append(row)
        self.file.write_text(json.dumps(self.content, indent=1))


# --- a sweep of eight experts with hydra/launcher=local -------------------------------------------------


def sweep(given: argparse.Namespace, rows: Rows) -> None:
    rows.add(f"8 experts, {len(given.devices)} devices", lambda: _sweep(given))


def _sweep(given: argparse.Namespace) -> dict[str, Any]:
    devices = [f"cuda:{n}" for n in given.devices] if not given.dry else ["cpu"] * 2
    place = given.out / f"store_{len(devices)}" if given.dry else Path(f"/tmp/sweep_{len(devices)}")
    seeds = range(2 if given.dry else 8)
    command = [
        *(sys.executable, "-m", "mergekit_lab", "-m", "+experiment=quickstart", "hydra/launcher=local"),
        f"hydra.launcher.devices=[{','.join(devices)}]",
        *("stage=finetune", "joint=false", "progress=false", f"training.steps={given.steps}"),
        *(f"seed={','.join(map(str, seeds))}", f"store.root={place}/store", f"run_dir={place}/run"),
        *(["training.warmup_steps=1", "trainer.accelerator=cpu"] if given.dry else []),
        *("~suite.tasks.mnist", "~suite.tasks.style", "~suite.tasks.digits"),
    ]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall = time.perf_counter() - begun
    jobs = [float(s) for s in re.findall(r"^#\d+ on \S+ done in ([\d.]+) s", done.stdout, re.MULTILINE)]
    if len(jobs) < len(seeds):
        raise RuntimeError((done.stdout + done.stderr)[-400:])
    made = list(Path(place, "store/experts").glob("*/manifest.json"))
    trained = [json.loads(m.read_text())["info"]["wall_seconds"] for m in made]
    return {"wall_seconds": round(wall, 2), "job_seconds": jobs, "training_seconds": trained}


# --- one run whose stages are spread over the devices -----------------------------------------------------


def run(given: argparse.Namespace, rows: Rows) -> None:
    rows.add(f"8 tasks, {len(given.devices)} devices", lambda: _run(given))


def _run(given: argparse.Namespace) -> dict[str, Any]:
    """Experts, Fishers, coefficient searches and evaluations; what each kind took, summed over devices."""
    devices = [f"cuda:{n}" for n in given.devices] if not given.dry else ["cpu"] * 2
    place = given.out / "run_store" if given.dry else Path(f"/tmp/run_{len(devices)}")
    command = [
        *(sys.executable, "-m", "mergekit_lab", "+experiment=quickstart", "joint=false", "progress=false"),
        *(f"device=[{','.join(devices)}]", f"store.root={place}/store", f"run_dir={place}/run"),
        *(["training.steps=2", "training.warmup_steps=1", "search.coefficients=[0.3]"] if given.dry else []),
        *([] if given.dry else ["suite=glyphs8", f"training.steps={given.steps}"]),
    ]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-400:])
    busy: dict[str, list[float]] = {}
    for made in Path(place, "store").glob("*/*/manifest.json"):
        seconds = json.loads(made.read_text())["info"].get("wall_seconds", 0.0)
        busy.setdefault(made.parent.parent.name, []).append(seconds)
    kinds = {kind: {"pieces": len(each), "seconds": round(sum(each), 1)} for kind, each in sorted(busy.items())}
    return {"wall_seconds": round(wall, 2), "kinds": kinds}


# --- data-parallel training ------------------------------------------------------------------------------


def ddp(given: argparse.Namespace, rows: Rows) -> None:
    devices = ["cpu", "cpu"] if given.dry else [f"cuda:{n}" for n in given.devices]

    def measure() -> dict[str, Any]:
        found = together(_ddp_rank, (given.dry, str(rows.file) + "l"), devices)
        for row in found:
            rows.add(row.pop("name"), lambda row=row: row)
        return {"rows": len(found)}

    rows.add("all rows", measure)


def _tell(rank: int, row: dict[str, Any], file: str) -> None:
    """A row as soon as it is there, in case the part is cut."""
    if rank == 0:
        print(json.dumps(row), flush=True)
        with open(file, "a") as lines:
            lines.write(json.dumps(row) + "\n")


def _ddp_rank(dry: bool, file: str) -> list[dict[str, Any]]:
    import torch.distributed as dist

    rank, world, device = _join(dry)
    found = []
    try:
        for model in ("glyph-clip",) if dry else ("ViT-B-32-quickgelu", "ViT-B-16-quickgelu"):
            for name, make in OPTIMIZERS.items():
                row = _ddp_row(model, make, rank, world, device)
                if model != "ViT-B-16-quickgelu":
                    row |= _as_one_process(model, make, rank, world, device)
                found.append({"name": f"{model} {name}", **row})
                _tell(rank, found[-1], file)
    finally:
        dist.destroy_process_group()
    return found


def _join(dry: bool) -> tuple[int, int, torch.device]:
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu") if dry else torch.device("cuda", rank)
    if not dry:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if dry else "nccl")
    return rank, world, device


class Batch:
    """Random pictures in 100 classes, the same on every rank; a rank takes its rows."""

    def __init__(self, model: str, count: int, device: torch.device) -> None:
        size, width = (32, 64) if model == "glyph-clip" else (224, 512)
        generator = torch.Generator().manual_seed(0)
        self.images = (
            torch.randint(0, 256, (count, 3, size, size), generator=generator).to(torch.uint8).to(device)
        )
        self.labels = torch.randint(0, 100, (count,), generator=generator).to(device)
        self.head = torch.randn(100, width, generator=generator).to(device)

    def loss(self, model: nn.Module, rows: slice, bf16: bool) -> Tensor:
        with torch.autocast(self.images.device.type, torch.bfloat16, enabled=bf16):
            return nn.functional.cross_entropy(model(self.images[rows]) @ self.head.T, self.labels[rows])


def _encoder(name: str, device: torch.device) -> nn.Module:
    from mergekit_lab.backbones import OpenClip

    return OpenClip(name, None).model().to(device).train()


def _steps(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor], count: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(count):
        optimizer.step(closure)


def _ddp_row(name: str, make: Any, rank: int, world: int, device: torch.device) -> dict[str, Any]:
    """Images a second at 128 a process in bf16, and whether all ranks have the same bits after every step."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    each, count = (8, 2) if device.type == "cpu" else (128, 15)
    batch = Batch(name, each, device)
    encoder = _encoder(name, device)
    model = DistributedDataParallel(encoder, device_ids=[rank] if device.type == "cuda" else None)
    optimizer = make(list(encoder.named_parameters()))
    if hasattr(optimizer, "attach"):
        optimizer.attach(model)
    generator = torch.Generator(device).manual_seed(rank)  # every rank has other pictures
    batch.images = torch.randint(0, 256, batch.images.shape, generator=generator, device=device).to(torch.uint8)

    def loss() -> Tensor:
        return batch.loss(model, slice(None), True)

    equal = []
    for _ in range(3):
        _steps(model, optimizer, loss, 1)
        equal.append(_ranks_equal(encoder, world))
    seconds = []
    for _ in range(3):
        dist.barrier()
        _wait(device)
        begun = time.perf_counter()
        _steps(model, optimizer, loss, count)
        _wait(device)
        seconds.append((time.perf_counter() - begun) / count)
    best = sorted(seconds)[1]
    return {
        "images_per_second": round(world * each / best, 1),
        "step_ms": [round(1e3 * s, 2) for s in seconds],
        "ranks_equal_after_each_step": all(equal),
    }


def _ranks_equal(model: nn.Module, world: int) -> bool:
    """By a sum of all bits, which any one that differs changes."""
    import torch.distributed as dist

    bits = [p.detach().contiguous().view(torch.int32).long().flatten() for p in model.parameters()]
    mine = torch.stack([(b * torch.arange(1, len(b) + 1, device=b.device)).sum() for b in bits])
    others = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(others, mine)
    return all(bool(torch.equal(mine, other)) for other in others)


def _as_one_process(name: str, make: Any, rank: int, world: int, device: torch.device) -> dict[str, Any]:
    """Three fp32 steps together, and the same batch in one process: the largest difference, beside the move."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    each = 4 if device.type == "cpu" else 32
    batch = Batch(name, each * world, device)
    encoder = _encoder(name, device)
    start = {n: p.detach().clone() for n, p in encoder.named_parameters()}
    model = DistributedDataParallel(encoder, device_ids=[rank] if device.type == "cuda" else None)
    optimizer = make(list(encoder.named_parameters()))
    if hasattr(optimizer, "attach"):
        optimizer.attach(model)
    mine = slice(rank * each, (rank + 1) * each)
    _steps(model, optimizer, lambda: batch.loss(model, mine, False), 3)
    found: dict[str, Any] = {}
    if rank == 0:
        alone = _encoder(name, device)
        other = make(list(alone.named_parameters()))
        _steps(alone, other, lambda: batch.loss(alone, slice(None), False), 3)
        gap, move = 0.0, 0.0
        for (n, p), q in zip(encoder.named_parameters(), alone.parameters(), strict=True):
            gap += float((p.detach() - q.detach()).double().square().sum())
            move += float((q.detach() - start[n]).double().square().sum())
        found = {"global_batch": each * world, "distance_to_one_process_over_its_move": (gap / move) ** 0.5}
    dist.barrier()
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- sharded training ------------------------------------------------------------------------------------

LLAMAS = {
    "tiny": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "intermediate_size": 32},
    "llama_1b": {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "intermediate_size": 8192},
    "llama_3b": {"vocab_size": 128256, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
                 "num_key_value_heads": 8, "intermediate_size": 8192},
}  # fmt: skip


def fsdp(given: argparse.Namespace, rows: Rows) -> None:
    devices = ["cpu", "cpu"] if given.dry else [f"cuda:{n}" for n in given.devices]

    def measure() -> dict[str, Any]:
        found = together(_fsdp_rank, (given.dry, given.shapes, str(rows.file) + "l"), devices)
        for row in found:
            rows.add(row.pop("name"), lambda row=row: row)
        return {"rows": len(found)}

    rows.add("all rows", measure)


def _fsdp_rank(dry: bool, shapes: list[str], file: str) -> list[dict[str, Any]]:
    import torch.distributed as dist

    rank, world, device = _join(dry)
    found = []
    try:
        for shape in ["tiny"] if dry else shapes:
            for name in ("mergopt", "asam"):
                found.append({"name": f"{shape} {name}", **_fsdp_row(shape, OPTIMIZERS[name], world, device)})
                _tell(rank, found[-1], file)
    finally:
        dist.destroy_process_group()
    return found


def _llama(shape: str, device: torch.device, world: int) -> nn.Module:
    """Random weights, made shard by shard; fp32, computed in bf16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMAS[shape], tie_word_embeddings=False, use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            local = p.to_local()  # type: ignore[attr-defined]
            local.fill_(1.0) if "norm" in name else local.normal_(0, 0.02)
    return model.train()


def _fsdp_row(shape: str, make: Any, world: int, device: torch.device) -> dict[str, Any]:
    samples, length, count = (1, 16, 1) if device.type == "cpu" else (2, 2048, 4)
    model = _llama(shape, device, world)
    optimizer = make(list(model.named_parameters()))
    tokens = torch.randint(0, LLAMAS[shape]["vocab_size"], (samples, length), device=device)
    losses: list[Tensor] = []

    def loss() -> Tensor:
        logits = model(input_ids=tokens).logits[:, :-1]
        value = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        losses.append(value.detach())
        return value

    _steps(model, optimizer, loss, 2)
    _wait(device)
    begun = time.perf_counter()
    _steps(model, optimizer, loss, count)
    _wait(device)
    seconds = (time.perf_counter() - begun) / count
    row = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_second": round(world * samples * length / seconds),
        "step_seconds": round(seconds, 3),
        "first_and_last_loss": [round(float(losses[0]), 3), round(float(losses[-1]), 3)],
    }
    if device.type == "cuda":
        row["peak_gib_a_gpu"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
        del model, optimizer, losses
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return row


# --- merges ----------------------------------------------------------------------------------------------


def merge(given: argparse.Namespace, rows: Rows) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "merge_engine"))
    from bench import SHAPES  # experiments/merge_engine

    from mergekit_lab.merging import TIES, TSVM, EpiMer

    methods = {"tsvm": TSVM(), "epimer": EpiMer(rank=32), "ties": TIES(density=0.2)}
    every = ["cpu", "cpu"] if given.dry else [f"cuda:{n}" for n in given.devices]
    for shape in ["tiny"] if given.dry else given.shapes:
        plan, experts, dtype, _ = SHAPES[shape]
        inputs = _inputs(plan, experts, dtype, every[0])
        for count in [1, 2] if given.dry else given.counts:
            for name, method in methods.items():
                devices = every[:count]
                rows.add(
                    f"{shape} {name} {count}",
                    partial(_merge_row, inputs, method, devices, given.repeats),
                )


def _inputs(plan: dict[str, Any], experts: int, dtype: torch.dtype, device: str) -> list[dict[str, Tensor]]:
    """Base and experts in the host's memory; their squares serve as Fishers."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: Any) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    base = {n: (0.02 * draw(s)).to(dtype).cpu() for n, s in plan.items()}
    others = [
        {n: (b.to(device).float() + 1e-3 * draw(b.shape)).to(dtype).cpu() for n, b in base.items()}
        for _ in range(experts)
    ]
    return [base, *others]


def _merge_row(
    inputs: list[dict[str, Tensor]], method: Any, devices: list[str], repeats: int
) -> dict[str, Any]:
    """The first call, the median of those after it, and a digest of the result, equal where all bits are."""
    from mergekit_lab.merging import merge_state_dicts

    base, *experts = inputs
    named = {str(n): e for n, e in enumerate(experts)}
    squares = [{n: t.square() for n, t in e.items()} for e in experts] if method.side_inputs else None
    statistics = {"fisher": squares} if squares else None
    seconds = []
    for _ in range(1 + repeats):
        begun = time.perf_counter()
        merged = merge_state_dicts(base, named, method, statistics=statistics, device=devices)
        seconds.append(round(time.perf_counter() - begun, 4))
    digest = hashlib.blake2b(digest_size=16)
    for name in base:
        digest.update(merged[name].contiguous().view(torch.uint8).numpy())
    return {"first": seconds[0], "seconds": round(median(seconds[1:]), 4), "digest": digest.hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["sweep", "run", "ddp", "fsdp", "merge"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, nargs="+", default=[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1], help="merge: how many of the devices")
    parser.add_argument("--shapes", nargs="+", default=["vit_l14", "llama_1b"])
    parser.add_argument("--repeats", type=int, default=2, help="merge: after the first call")
    parser.add_argument("--steps", type=int, default=500, help="sweep, run: of an expert")
    parser.add_argument("--label", default=None)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    globals()[given.part](given, Rows(given))


if __name__ == "__main__":
    main()
