"""Time and memory of the diagonal Fisher at ViT shapes: by layers, by vmap(grad), beside a training step.

    python experiments/curvature/bench.py --out experiments/curvature/results/gpu.json
    python experiments/curvature/bench.py --models glyph-clip --batch 8 --device cpu --out try.json  (a dry run)

Weights and images are random. A time is the median of the repeats after one warm-up, wall clock from call to
synchronized result, over the samples. Memory is the peak of what torch allocated, model included, in bytes and
in copies of the model. Errors are the largest one of a parameter over that parameter's largest entry, against
vmap(grad), on eight samples. `highest` is float32 throughout, `high` lets products use TF32.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from mergekit_lab.backbones import Classifier, OpenClip
from mergekit_lab.curvature import diagonal_fisher

CLASSES = 100


def compute_by_vmap(model: nn.Module, x: Tensor, y: Tensor, chunk: int) -> dict[str, Tensor]:
    """Every sample's gradient of the whole model, `chunk` at a time."""
    params = {n: p.detach() for n, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    totals = {n: torch.zeros_like(p) for n, p in params.items()}

    def compute_loss(p: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, (p, buffers), (image[None],)), label[None])

    gradients = vmap(grad(compute_loss), in_dims=(None, 0, 0))
    for images, labels in zip(x.split(chunk), y.split(chunk), strict=True):
        with sdpa_kernel(SDPBackend.MATH):
            for name, g in gradients(params, images, labels).items():
                totals[name] += g.square().sum(dim=0)
    return {n: t / len(y) for n, t in totals.items()}


def measure(work: Callable[[], object], samples: int, repeats: int, model_bytes: int) -> dict[str, float]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    sync = torch.cuda.synchronize if cuda else (lambda: None)
    work()
    sync()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        sync()
        seconds.append(time.perf_counter() - begun)
    row = {"ms_per_sample": round(1e3 * statistics.median(seconds) / samples, 4)}
    if cuda:
        peak = torch.cuda.max_memory_allocated()
        row |= {"peak_bytes": peak, "peak_model_copies": round(peak / model_bytes, 2)}
    return row


def allow_tf32(allowed: bool) -> None:
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def make_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def measure_activations(model: nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass leaves for the backward pass."""
    if not x.is_cuda:
        return 0
    before = torch.cuda.memory_allocated()
    kept = model(x)
    return torch.cuda.memory_allocated() - before - kept.numel() * kept.element_size()


def measure_case(name: str, args: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(0)
    encoder = OpenClip(name, None).make_model()
    head = torch.randn(CLASSES, encoder(torch.rand(1, 3, *encoder.size)).shape[1])
    model = Classifier(encoder, head).to(args.device)
    x = torch.rand(args.batch, 3, *encoder.size, device=args.device)
    y = torch.arange(args.batch, device=args.device) % CLASSES
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    rows: dict[str, object] = {"parameters": size // 4, "activation_bytes": measure_activations(model, x)}

    allow_tf32(False)
    few, labels = x[:8], y[:8]
    exact = compute_by_vmap(model, few, labels, 8)
    for precision in ("highest", "high"):
        allow_tf32(precision == "high")
        diagonal = diagonal_fisher(model, [(few, labels)])
        error = max(float((diagonal[n] - e).abs().max() / e.abs().max()) for n, e in exact.items())
        rows[f"error, {precision}"] = error
    del exact, diagonal

    for precision in ("highest", "high"):
        allow_tf32(precision == "high")

        def run(work: Callable[[], object]) -> dict[str, float]:
            return measure(work, args.batch, args.repeats, size)

        for chunk in args.chunks:
            rows[f"by layers, chunk {chunk}, {precision}"] = run(
                lambda chunk=chunk: diagonal_fisher(model, [(x, y)], chunk=chunk)
            )
        if precision == "highest":
            rows[f"vmap(grad), chunk 8, {precision}"] = run(lambda: compute_by_vmap(model, x, y, 8))
        rows[f"training step, {precision}"] = run(make_step(model, x, y))
        model.zero_grad(set_to_none=True)
        if args.compile:
            rows[f"training step, compiled, {precision}"] = run(make_step(torch.compile(model), x, y))
            model.zero_grad(set_to_none=True)
            rows[f"squares of layers, {precision}"] = measure_squares(
                model, (encoder.size[0] // 32) ** 2 + 1, args, run
            )
    return rows


def measure_squares(
    model: nn.Module, tokens: int, args: argparse.Namespace, run: Callable[..., dict[str, float]]
) -> dict[str, Any]:
    """The squared gradients of all linear layers from inputs and output gradients: as written and compiled."""
    shapes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)]

    def write(grads: Tensor, inputs: Tensor) -> Tensor:
        return (grads.mT @ inputs).square_().sum(dim=0)

    def run_layers(square: Callable[[Tensor, Tensor], Tensor]) -> None:
        for height, width in shapes:
            square(activations_of[height], activations_of[width])

    activations_of = {n: torch.randn(args.batch, tokens, n, device=args.device) for n in set(sum(shapes, ()))}
    report: dict[str, Any] = {"as written": run(lambda: run_layers(write))}
    for name, mode in {"compiled": "default", "autotuned": "max-autotune-no-cudagraphs"}.items():
        compiled = torch.compile(write, mode=mode, dynamic=False)
        report[name] = run(lambda compiled=compiled: run_layers(compiled))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["ViT-B-32", "ViT-B-16"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="also what torch.compile makes of it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    card = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "CPU"
    results: dict[str, object] = {
        "device": card, "torch": torch.__version__, "date": str(date.today()), "batch": args.batch,
    }  # fmt: skip
    for name in args.models:
        results[name] = measure_case(name, args)
        print(name, json.dumps(results[name], indent=1), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
