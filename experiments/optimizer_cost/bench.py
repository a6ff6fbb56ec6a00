"""What optimizers and parametrizations cost beside fused AdamW: iterations a second and memory. See README.md.

python experiments/optimizer_cost/bench.py --out experiments/optimizer_cost/results.json
"""

import argparse
import json
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mergekit_lab.backbones import AttentionLinear, Full, Linearized, LoRA, OpenClip, Parametrization
from mergekit_lab.optim import (
    ASAM,
    PGN,
    RWP,
    SAGM,
    SAM,
    SSAMD,
    SSAMF,
    SWA,
    WASAM,
    FriendlySAM,
    MergOPT,
    count_gradient_evaluations,
)

ADAMW = partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.1, fused=True)
OPTIMIZERS: dict[str, Callable] = {
    "adamw": ADAMW,
    "mergopt": partial(MergOPT, base=ADAMW),
    "mergopt gaussian": partial(MergOPT, base=ADAMW, distribution="gaussian"),
    "sam": partial(SAM, base=ADAMW),
    "asam saft": partial(ASAM, base=ADAMW, scaling="saft"),
    "asam samsung": partial(ASAM, base=ADAMW),
    "sam, ascent_fraction .25": partial(SAM, base=ADAMW, ascent_fraction=0.25),
    "friendly_sam": partial(FriendlySAM, base=ADAMW),
    "pgn": partial(PGN, base=ADAMW),
    "sagm": partial(SAGM, base=ADAMW),
    "ssamf": partial(SSAMF, base=ADAMW),
    "ssamd": partial(SSAMD, base=ADAMW, steps=1000),
    "swa": partial(SWA, base=ADAMW, steps=2, start=0),
    "wasam": partial(WASAM, base=ADAMW, steps=2, start=0),
    "rwp": partial(RWP, base=ADAMW),
    "mergopt worst_of 2": partial(MergOPT, base=ADAMW, worst_of=2),
}
PARAMETRIZATIONS: dict[str, Parametrization] = {
    "linearized": Linearized(),
    "attention_linear": AttentionLinear(),
    "lora": LoRA(),
}


class Vision:
    """CLIP's ViT-B/32 image tower with random weights, batches of 128 pictures, a head of 100 classes."""

    def __init__(self, device: torch.device, small: bool) -> None:
        name, size, count = ("glyph-clip", 32, 8) if small else ("ViT-B-32-quickgelu", 224, 128)
        self.backbone = OpenClip(name, None)
        self.images = torch.randint(0, 256, (count, 3, size, size), device=device).to(torch.uint8)
        self.labels = torch.randint(0, 100, (count,), device=device)
        self.head = torch.randn(100, 64 if small else 512, device=device)

    def make_model(self) -> nn.Module:
        return self.backbone.make_model()

    def compute_loss(self, model: nn.Module, fraction: float) -> Tensor:
        rows = round(fraction * len(self.labels))
        logits = model(self.images[:rows]) @ self.head.T
        return nn.functional.cross_entropy(logits, self.labels[:rows])


class LlamaProblem:
    """A Llama of SmolLM2-135M's shape with random weights, batches of 8 sequences of 512 tokens."""

    def __init__(self, device: torch.device, small: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = (
            {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "intermediate_size": 32}
            if small
            else {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
                  "num_key_value_heads": 3, "intermediate_size": 1536}
        )  # fmt: skip
        config = LlamaConfig(**shape, tie_word_embeddings=True, use_cache=False)
        torch.manual_seed(0)
        self.base = LlamaForCausalLM(config)
        self.tokens = torch.randint(0, shape["vocab_size"], (8, 32 if small else 512), device=device)

    def make_model(self) -> nn.Module:
        return deepcopy(self.base)

    def compute_loss(self, model: nn.Module, fraction: float) -> Tensor:
        tokens = self.tokens[: round(fraction * len(self.tokens))]
        logits = model(input_ids=tokens).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def measure(
    problem: Vision | LlamaProblem, parametrization: Parametrization, make: Callable, bf16: bool, options
) -> dict:
    """Median seconds of a step, and peak memory, of one optimizer on one parametrization."""
    device = torch.device(options.device)
    model = parametrization.make_trainable(problem.make_model()).to(device)
    model.train()
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = make(trained)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def closure() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = problem.compute_loss(model, getattr(optimizer, "batch_fraction", 1.0))
        optimizer.zero_grad()
        loss.backward()
        return loss

    def time_steps(count: int) -> float:
        sync(device)
        begun = time.perf_counter()
        for _ in range(count):
            optimizer.step(closure)
        sync(device)
        return (time.perf_counter() - begun) / count

    one = time_steps(options.warmup) and time_steps(2)
    count = max(2, int(options.seconds / 4 / one))
    seconds = sorted(time_steps(count) for _ in range(4))
    evaluation = None
    if make is ADAMW:
        sync(device)
        begun = time.perf_counter()
        for _ in range(count):
            closure()
        sync(device)
        evaluation = (time.perf_counter() - begun) / count
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "seconds": (seconds[1] + seconds[2]) / 2,
        "kernel_seconds": measure_kernel_seconds(time_steps) if device.type == "cuda" else None,
        "evaluation_seconds": evaluation,
        "spread": seconds[-1] / seconds[0] - 1,
        "peak_gib": peak / 2**30,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for _, p in trained),
        "gradient_evaluations": float(count_gradient_evaluations(optimizer)),
    }


def measure_kernel_seconds(steps: Callable[[int], float], count: int = 3) -> float | None:
    """What the card works for a step, however late its kernels are launched; none where it cannot be traced."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        steps(count)
    return sum(event.self_device_time_total for event in trace.key_averages()) / 1e6 / count or None


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def tabulate(problem: Vision | LlamaProblem, name: str, bf16: bool, options) -> list[dict]:
    """Rows of one problem in one precision; ratios are to the mean of AdamW, which is measured three times.

    A method of two evaluations cannot be cheaper than AdamW and one more evaluation: that is the floor.
    """
    wanted = [(o, "full", Full(), make) for o, make in OPTIMIZERS.items()]
    again = ("adamw", "full", Full(), ADAMW)
    wanted = [*wanted[:5], again, *wanted[5:]]
    wanted += [("adamw", k, parametrization, ADAMW) for k, parametrization in PARAMETRIZATIONS.items()]
    wanted += [again]
    rows = []
    for optimizer, finetuning, parametrization, make in wanted:
        row = {"problem": name, "precision": "bf16-mixed" if bf16 else "fp32", "optimizer": optimizer}
        try:
            row |= {"finetuning": finetuning} | measure(problem, parametrization, make, bf16, options)
        except torch.cuda.OutOfMemoryError:
            print(name, optimizer, finetuning, "does not fit", flush=True)
            continue
        finally:
            if options.device == "cuda":
                torch.cuda.empty_cache()
        rows.append(row)
    plain = [r for r in rows if r["optimizer"] == "adamw" and r["finetuning"] == "full"]
    seconds = sum(r["seconds"] for r in plain) / len(plain)
    kernels = sum(r["kernel_seconds"] or 0 for r in plain) / len(plain)
    floor = 1 + sum(r["evaluation_seconds"] for r in plain) / len(plain) / seconds
    print(f"{name} two evaluations and a step: at least {floor:.2f}x", flush=True)
    for r in rows:
        r["ratio"] = r["seconds"] / seconds
        r["kernel_ratio"] = r["kernel_seconds"] / kernels if kernels and r["kernel_seconds"] else None
        r["floor_of_two"] = floor
        r["its"] = 1 / r["seconds"]
        r["extra_copies"] = (r["peak_gib"] - plain[0]["peak_gib"]) * 2**30 / (4 * r["parameters"])
        label = r["optimizer"] if r["finetuning"] == "full" else f"adamw, {r['finetuning']}"
        print(
            f"{name:8s} {r['precision']:10s} {label:26s} {r['its']:7.2f} it/s {r['ratio']:5.2f}x "
            f"(kernels {r['kernel_ratio'] or 0:4.2f}x) "
            f"{r['peak_gib']:6.2f} GiB {r['extra_copies']:+5.2f} copies",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="that each row is timed")
    parser.add_argument("--warmup", type=int, default=3, help="steps")
    parser.add_argument("--small", action="store_true", help="small models, to see that it runs")
    parser.add_argument(
        "--only", nargs="+", default=["vision bf16", "vision fp32", "language bf16", "language fp32"]
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    rows = []
    for which in options.only:
        domain, precision = which.split()
        problem = (Vision if domain == "vision" else LlamaProblem)(device, options.small)
        rows += tabulate(problem, domain, precision == "bf16", options)
        if options.out:
            machine = {"card": card, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
            options.out.write_text(json.dumps(machine | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
