"""Time, memory and accuracy of every merge method on one GPU, at image-encoder and Llama shapes.

    python experiments/merge_engine/bench.py --out results.json
    python experiments/merge_engine/bench.py --shapes tiny --device cpu --out /tmp/try.json     (a dry run)

Inputs lie on the GPU in float32 (bfloat16 for Llama). A time is the median of the repeats after a first call,
wall clock from call to synchronized result. The first call, with nothing in torch's memory pool, stands beside
it. Memory is the peak beyond the inputs. The error of matrix methods is the largest relative one over the
matrices of the first block, against the same method in float64 on a CPU.
"""

import argparse
import json
import platform
import statistics
import time
from datetime import date
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mergekit_lab.merging import (
    CAT,
    DARE,
    DELLA,
    DOGE,
    EMR,
    PCB,
    RAM,
    SCE,
    SLERP,
    TIES,
    TSVC,
    TSVM,
    WUDI,
    AdaMerging,
    ArceeFusion,
    Breadcrumbs,
    ConsensusTA,
    CoreSpace,
    EpiMer,
    Fisher,
    IsoC,
    IsoCTS,
    Karcher,
    KnOTS,
    LiNeS,
    LocalizeStitch,
    Method,
    ModelStock,
    MultiSLERP,
    NearSwap,
    NuSLERP,
    Passthrough,
    RegMean,
    RegMeanPlusPlus,
    TaskArithmetic,
    WeightAverage,
    merge_state_dicts,
)
from mergekit_lab.merging.spectral import SpectralMethod

Shapes = dict[str, tuple[int, ...]]


def list_vit_shapes(width: int, layers: int, patch: int, tokens: int, embed: int) -> Shapes:
    """An open_clip image tower."""
    shapes: Shapes = {
        "visual.class_embedding": (width,),
        "visual.positional_embedding": (tokens, width),
        "visual.proj": (width, embed),
        "visual.conv1.weight": (width, 3, patch, patch),
        **{f"visual.{ln}.{p}": (width,) for ln in ("ln_pre", "ln_post") for p in ("weight", "bias")},
    }
    for i in range(layers):
        at = f"visual.transformer.resblocks.{i}."
        shapes |= {f"{at}{ln}.{p}": (width,) for ln in ("ln_1", "ln_2") for p in ("weight", "bias")}
        shapes |= {f"{at}attn.in_proj_weight": (3 * width, width), f"{at}attn.in_proj_bias": (3 * width,)}
        shapes |= {f"{at}attn.out_proj.weight": (width, width), f"{at}attn.out_proj.bias": (width,)}
        shapes |= {f"{at}mlp.c_fc.weight": (4 * width, width), f"{at}mlp.c_fc.bias": (4 * width,)}
        shapes |= {f"{at}mlp.c_proj.weight": (width, 4 * width), f"{at}mlp.c_proj.bias": (width,)}
    return shapes


def list_llama_shapes(layers: int, hidden: int, mlp: int, kv: int, vocabulary: int) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{p}_proj.weight": (hidden, hidden) for p in "qo"}
        shapes |= {f"{at}self_attn.{p}_proj.weight": (kv, hidden) for p in "kv"}
        shapes |= {f"{at}mlp.{p}_proj.weight": (mlp, hidden) for p in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (hidden, mlp)}
        shapes |= {f"{at}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    return shapes


SHAPES = {
    "tiny": (list_vit_shapes(64, 2, 8, 17, 32), 4, torch.float32, "*resblocks.0.*"),
    "vit_b32": (list_vit_shapes(768, 12, 32, 50, 512), 8, torch.float32, "*resblocks.0.*"),
    "vit_b16": (list_vit_shapes(768, 12, 16, 197, 512), 8, torch.float32, "*resblocks.0.*"),
    "vit_l14": (list_vit_shapes(1024, 24, 14, 257, 768), 8, torch.float32, "*resblocks.0.*"),
    "vit_l14_t20": (list_vit_shapes(1024, 24, 14, 257, 768), 20, torch.float32, "*resblocks.0.*"),
    "llama_1b": (list_llama_shapes(16, 2048, 8192, 512, 128256), 7, torch.bfloat16, "*layers.0.*"),
}


def list_methods() -> dict[str, Method]:
    """All; some take fewer experts than others, see `FEWER`."""
    return {
        "task_arithmetic": TaskArithmetic(coefficient=0.3),
        "fisher": Fisher(),
        "ties": TIES(density=0.2),
        "ties_mergekit": TIES(density=0.2, preset="mergekit"),
        "dare": DARE(),
        "tsvm": TSVM(),
        "epimer": EpiMer(rank=32),
        "iso_c": IsoC(),
        "iso_cts": IsoCTS(),
        "wudi": WUDI(),
        "average": WeightAverage(),
        "breadcrumbs": Breadcrumbs(),
        "della": DELLA(),
        "consensus": ConsensusTA(),
        "model_stock": ModelStock(),
        "adamerging": AdaMerging(),
        "regmean": RegMean(),
        "regmean_plusplus": RegMeanPlusPlus(),
        "slerp": SLERP(),
        "nuslerp": NuSLERP(),
        "nuslerp_rows": NuSLERP(along="last"),
        "multislerp": MultiSLERP(),
        "karcher": Karcher(),
        "sce": SCE(density=0.2),
        "ram_plus": RAM(boost=0.1),
        "nearswap": NearSwap(),
        "arcee_fusion": ArceeFusion(),
        "passthrough": Passthrough(),
        "lines": LiNeS(),
        "pcb": PCB(),
        "doge": DOGE(),
        "cat": CAT(),
        "tsvc": TSVC(),
        "emr": EMR(),
        "localize_stitch": LocalizeStitch(),
        "knots": KnOTS(),
        "core_space": CoreSpace(),
    }


FEWER = dict.fromkeys(("slerp", "nuslerp", "nuslerp_rows", "nearswap", "arcee_fusion"), 2) | {"passthrough": 1}
"""Experts that a method takes, where it does not take any number."""


def make_inputs(
    shapes: Shapes, experts: int, dtype: torch.dtype, device: str
) -> tuple[dict, list[dict], list[dict]]:
    """Base, experts and Fishers: task vectors are a shared low-rank part plus heavy-tailed noise."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def move(value: Tensor) -> Tensor:
        delta = 5e-4 * draw(*value.shape)
        if value.dim() == 2:
            rank = min(8, *value.shape)
            delta += 5e-4 * draw(value.shape[0], rank) @ draw(rank, value.shape[1]) / rank**0.5
        return (value.float() + delta).to(dtype)

    base = {name: (0.04 * draw(*shape)).to(dtype) for name, shape in shapes.items()}
    people = [{name: move(value) for name, value in base.items()} for _ in range(experts)]
    fishers = [
        {name: (1e-3 * draw(*shape).square()).to(dtype) for name, shape in shapes.items()} for _ in people
    ]
    return base, people, fishers


def make_grams(shapes: Shapes) -> dict[str, Tensor]:
    """An input Gram for every matrix but the embeddings, in the host's memory; one tensor for each size."""
    gram_of_width: dict[int, Tensor] = {}
    by_layer = {}
    for name, shape in shapes.items():
        if len(shape) == 2 and name.endswith(".weight") and "embed" not in name:
            if shape[1] not in gram_of_width:
                inputs = torch.randn(2 * shape[1], shape[1], generator=torch.Generator().manual_seed(shape[1]))
                gram_of_width[shape[1]] = inputs.mT @ inputs / len(inputs)
            by_layer[name.removesuffix(".weight")] = gram_of_width[shape[1]]
    return by_layer


def sync(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure_time(call, device: str, repeats: int) -> tuple[float, list[float], int]:
    """Seconds of the first call, which has to ask the driver for memory, and of those after it; peak bytes."""
    times, extra = [], 0
    if device != "cpu":
        torch.cuda.empty_cache()
    for _ in range(1 + repeats):
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device != "cpu" else 0
        sync(device)
        begun = time.perf_counter()
        call()
        sync(device)
        times.append(time.perf_counter() - begun)
        extra = torch.cuda.max_memory_allocated() - before if device != "cpu" else 0
    return times[0], times[1:], extra


def list_gpus() -> list[str]:
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def measure_shared(call, alone: dict[str, Tensor], repeats: int, seconds: float) -> dict:
    """The same merge over all GPUs: time, speed-up, and whether its tensors are bit for bit the same."""
    merged = call()
    same = all(torch.equal(merged[name], tensor) for name, tensor in alone.items())
    _, times, _ = measure_time(call, "cuda", repeats)
    together = statistics.median(times)
    return {
        "gpus": torch.cuda.device_count(),
        "shared_seconds": round(together, 4),
        "speed_up": round(seconds / together, 2),
        "identical": same,
    }


def measure_error(
    method: Method, base: dict, experts: list[dict], fishers: list[dict], pattern: str, device: str
) -> float:
    """Largest ‖Δ − Δ64‖ / ‖Δ64‖ over the tensors that match the pattern."""
    names = [n for n in base if fnmatchcase(n, pattern)]

    def part(state: dict, **how) -> dict:
        return {n: state[n].to(**how) for n in names}

    def run(where: str, dtype: torch.dtype) -> dict[str, Tensor]:
        theirs = [part(f, device=where, dtype=dtype) for f in fishers]
        origin = part(base, device=where, dtype=dtype)
        merged = merge_state_dicts(
            origin, [part(e, device=where, dtype=dtype) for e in experts], method,
            statistics={"fisher": theirs} if method.side_inputs else None, device=where, dtype=torch.float64,
        )  # fmt: skip
        return {n: (merged[n] - origin[n].double()).cpu() for n in names}

    merged, wanted = run(device, torch.float32), run("cpu", torch.float64)
    moved = [n for n in names if bool(wanted[n].any())]
    return max(float((merged[n] - wanted[n]).norm() / wanted[n].norm()) for n in moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["vit_b32", "vit_b16", "vit_l14"], choices=SHAPES)
    parser.add_argument("--methods", nargs="+", default=list(list_methods()), choices=list(list_methods()))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3, help="after the first call; 0: that one alone")
    parser.add_argument("--together", action="store_true", help="all GPUs share the tensors of each merge")
    parser.add_argument("--seconds", type=float, default=600, help="start nothing after this long")
    parser.add_argument("--no-accuracy", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    begun = time.monotonic()
    card = torch.cuda.get_device_name() if options.device != "cpu" else platform.processor() or "cpu"
    about = {
        "date": str(date.today()),
        "torch": torch.__version__,
        "card": card,
        "command": "experiments/merge_engine/bench.py",
    }
    rows: list[dict] = []
    for shape in options.shapes:
        plan, count, dtype, pattern = SHAPES[shape]
        base, experts, fishers = make_inputs(plan, count, dtype, options.device)
        for label in options.methods:
            if time.monotonic() - begun > options.seconds:
                break
            method, taken = list_methods()[label], FEWER.get(label, count)
            row = {
                "shapes": shape,
                "experts": taken,
                "entries": sum(v.numel() for v in base.values()),
                "method": label,
            }
            side = {k: fishers if k == "fisher" else [make_grams(plan)] * count for k in method.side_inputs}
            call = partial(
                merge_state_dicts, base, experts[:taken], method, statistics=side, device=options.device
            )
            try:
                first, times, extra = measure_time(call, options.device, options.repeats)
                row |= {"first_seconds": round(first, 4), "extra_gib": round(extra / 2**30, 2)}
                if times:
                    row["seconds"] = round(statistics.median(times), 4)
                if options.together and times:
                    row |= measure_shared(
                        partial(call, device=list_gpus()), call(), options.repeats, row["seconds"]
                    )
                if isinstance(method, SpectralMethod) and not options.no_accuracy:
                    row["error"] = measure_error(method, base, experts, fishers, pattern, options.device)
            except (RuntimeError, ValueError) as problem:
                row["failed"] = str(problem).splitlines()[0]
            rows.append(row)
            print(row, flush=True)
            options.out.write_text(json.dumps({**about, "rows": rows}, indent=1))
        del base, experts, fishers


if __name__ == "__main__":
    main()
