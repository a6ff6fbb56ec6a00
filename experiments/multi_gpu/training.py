"""Training one model on several GPUs: DDP of CLIP's image towers, FSDP2 of Llamas. Parts of bench.py."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rows import PartRows
from torch import Tensor, nn

from mergekit_lab.optim import ASAM, SAM, MergOPT
from mergekit_lab.workers import run_together

ADAMW = partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.1, fused=True)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda named: ADAMW([p for _, p in named]),
    "sam": partial(SAM, base=ADAMW),
    "asam": partial(ASAM, base=ADAMW, scaling="saft"),
    "mergopt": partial(MergOPT, base=ADAMW),
}


def measure_ddp(options: argparse.Namespace, rows: PartRows) -> None:
    devices = ["cpu", "cpu"] if options.dry else [f"cuda:{n}" for n in options.devices]

    def measure() -> dict[str, Any]:
        rank_rows = run_together(_run_ddp_rank, (options.dry, str(rows.file) + "l"), devices)
        for row in rank_rows:
            rows.add(row.pop("name"), lambda row=row: row)
        return {"rows": len(rank_rows)}

    rows.add("all rows", measure)


def _tell(rank: int, row: dict[str, Any], file: str) -> None:
    """A row as soon as it is there, in case the part is cut."""
    if rank == 0:
        print(json.dumps(row), flush=True)
        with open(file, "a") as lines:
            lines.write(json.dumps(row) + "\n")


def _run_ddp_rank(dry: bool, file: str) -> list[dict[str, Any]]:
    import torch.distributed as dist

    rank, world, device = _join(dry)
    rows = []
    try:
        for model in ("glyph-clip",) if dry else ("ViT-B-32-quickgelu", "ViT-B-16-quickgelu"):
            for name, make in OPTIMIZERS.items():
                row = _measure_ddp(model, make, rank, world, device)
                if model != "ViT-B-16-quickgelu":
                    row |= _as_one_process(model, make, rank, world, device)
                rows.append({"name": f"{model} {name}", **row})
                _tell(rank, rows[-1], file)
    finally:
        dist.destroy_process_group()
    return rows


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

    def compute_loss(self, model: nn.Module, rows: slice, bf16: bool) -> Tensor:
        with torch.autocast(self.images.device.type, torch.bfloat16, enabled=bf16):
            return nn.functional.cross_entropy(model(self.images[rows]) @ self.head.T, self.labels[rows])


def _make_encoder(name: str, device: torch.device) -> nn.Module:
    from mergekit_lab.backbones import OpenClip

    return OpenClip(name, None).make_model().to(device).train()


def _take_steps(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor], count: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(count):
        optimizer.step(closure)


def _measure_ddp(name: str, make: Any, rank: int, world: int, device: torch.device) -> dict[str, Any]:
    """Images a second at 128 a process in bf16, and whether all ranks have the same bits after every step."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    each, count = (8, 2) if device.type == "cpu" else (128, 15)
    batch = Batch(name, each, device)
    encoder = _make_encoder(name, device)
    model = DistributedDataParallel(encoder, device_ids=[rank] if device.type == "cuda" else None)
    optimizer = make(list(encoder.named_parameters()))
    if hasattr(optimizer, "attach"):
        optimizer.attach(model)
    generator = torch.Generator(device).manual_seed(rank)  # every rank has other pictures
    batch.images = torch.randint(0, 256, batch.images.shape, generator=generator, device=device).to(torch.uint8)

    def compute_loss() -> Tensor:
        return batch.compute_loss(model, slice(None), True)

    equal = []
    for _ in range(3):
        _take_steps(model, optimizer, compute_loss, 1)
        equal.append(_are_ranks_equal(encoder, world))
    seconds = []
    for _ in range(3):
        dist.barrier()
        _wait(device)
        begun = time.perf_counter()
        _take_steps(model, optimizer, compute_loss, count)
        _wait(device)
        seconds.append((time.perf_counter() - begun) / count)
    best = sorted(seconds)[1]
    return {
        "images_per_second": round(world * each / best, 1),
        "step_ms": [round(1e3 * s, 2) for s in seconds],
        "ranks_equal_after_each_step": all(equal),
    }


def _are_ranks_equal(model: nn.Module, world: int) -> bool:
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
    encoder = _make_encoder(name, device)
    start = {n: p.detach().clone() for n, p in encoder.named_parameters()}
    model = DistributedDataParallel(encoder, device_ids=[rank] if device.type == "cuda" else None)
    optimizer = make(list(encoder.named_parameters()))
    if hasattr(optimizer, "attach"):
        optimizer.attach(model)
    mine = slice(rank * each, (rank + 1) * each)
    _take_steps(model, optimizer, lambda: batch.compute_loss(model, mine, False), 3)
    row: dict[str, Any] = {}
    if rank == 0:
        alone = _make_encoder(name, device)
        other = make(list(alone.named_parameters()))
        _take_steps(alone, other, lambda: batch.compute_loss(alone, slice(None), False), 3)
        gap, move = 0.0, 0.0
        for (n, p), q in zip(encoder.named_parameters(), alone.parameters(), strict=True):
            gap += float((p.detach() - q.detach()).double().square().sum())
            move += float((q.detach() - start[n]).double().square().sum())
        row = {"global_batch": each * world, "distance_to_one_process_over_its_move": (gap / move) ** 0.5}
    dist.barrier()
    return row


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


LLAMAS = {
    "tiny": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "intermediate_size": 32},
    "llama_1b": {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "intermediate_size": 8192},
    "llama_3b": {"vocab_size": 128256, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
                 "num_key_value_heads": 8, "intermediate_size": 8192},
}  # fmt: skip


def measure_fsdp(options: argparse.Namespace, rows: PartRows) -> None:
    devices = ["cpu", "cpu"] if options.dry else [f"cuda:{n}" for n in options.devices]

    def measure() -> dict[str, Any]:
        rank_rows = run_together(_run_fsdp_rank, (options.dry, options.shapes, str(rows.file) + "l"), devices)
        for row in rank_rows:
            rows.add(row.pop("name"), lambda row=row: row)
        return {"rows": len(rank_rows)}

    rows.add("all rows", measure)


def _run_fsdp_rank(dry: bool, shapes: list[str], file: str) -> list[dict[str, Any]]:
    import torch.distributed as dist

    rank, world, device = _join(dry)
    rows = []
    try:
        for shape in ["tiny"] if dry else shapes:
            for name in ("mergopt", "asam"):
                rows.append(
                    {"name": f"{shape} {name}", **_measure_fsdp(shape, OPTIMIZERS[name], world, device)}
                )
                _tell(rank, rows[-1], file)
    finally:
        dist.destroy_process_group()
    return rows


def _make_llama(shape: str, device: torch.device, world: int) -> nn.Module:
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


def _measure_fsdp(shape: str, make: Any, world: int, device: torch.device) -> dict[str, Any]:
    samples, length, count = (1, 16, 1) if device.type == "cpu" else (2, 2048, 4)
    model = _make_llama(shape, device, world)
    optimizer = make(list(model.named_parameters()))
    tokens = torch.randint(0, LLAMAS[shape]["vocab_size"], (samples, length), device=device)
    losses: list[Tensor] = []

    def compute_loss() -> Tensor:
        logits = model(input_ids=tokens).logits[:, :-1]
        value = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        losses.append(value.detach())
        return value

    _take_steps(model, optimizer, compute_loss, 2)
    _wait(device)
    begun = time.perf_counter()
    _take_steps(model, optimizer, compute_loss, count)
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
