"""What two processes do in tests/training/test_processes.py."""

from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from language import Colors, make_tiny_backbone
from tiny import TinyEncoder, make_tiny_objective
from trainings import Cut

from mergekit_lab.optim import ASAM, SAM, WASAM, MergOPT
from mergekit_lab.training import TrainingSettings, clock, finetune

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda named: ADAMW([p for _, p in named]),
    "sam": partial(SAM, base=ADAMW, rho=0.1),
    "asam": partial(ASAM, base=ADAMW, scaling="saft"),
    "mergopt": partial(MergOPT, base=ADAMW, scale=0.01),
    "wasam": partial(WASAM, base=ADAMW, steps=6, start=0.2),
}
SHARDED = ("mergopt", "asam", "wasam")
RESUMED = ("mergopt", "wasam")
SETTINGS = TrainingSettings(
    steps=6, batch_size=12, lr=1e-2, weight_decay=0.0, validations=2, accumulate=2, keep="last"
)
LANGUAGE = ("llama", "t5")
"""Kinds of `save_tiny`; the Llama decodes its answers, the T5 chooses them."""


def train(
    name: str,
    resume: Path,
    seen: list[float] | None = None,
    cut: int | None = None,
    settings: TrainingSettings = SETTINGS,
    **trainer: Any,
) -> dict[str, Any] | None:
    """Weights after six steps; `seen` gets a checksum of them after every one; None if `cut` at one."""
    model = TinyEncoder()
    model.body[3].p = 0.0  # masks depend on a batch's shape
    head = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))

    def look(metrics: Any, step: int) -> None:
        if step == cut:
            raise Cut
        if seen is not None and "train_loss" in metrics:
            seen.append(sum(float(p.detach().abs().sum()) for p in model.parameters()))

    options = {"accelerator": "cpu", "enable_progress_bar": False, **trainer}
    try:
        done = finetune(
            model, {"a": make_tiny_objective(head)}, OPTIMIZERS[name], settings, seed=0, resume=resume,
            trainer=options, on_metrics=look,
        )  # fmt: skip
    except Cut:
        return None
    return None if done is None else {"state": done.state, "curve": done.curve}


def train_language(architecture: str, models: Path, resume: Path, **trainer: Any) -> dict[str, Any] | None:
    """Weights and validation after four steps of a tiny language model."""
    answering = "generate" if architecture == "llama" else "choices"
    backbone = make_tiny_backbone(models / architecture, architecture, answering=answering)
    optimizer = partial(MergOPT, base=partial(torch.optim.SGD, lr=0.1, momentum=0.9), scale=0.01)
    settings = TrainingSettings(
        steps=4, batch_size=8, lr=0.1, weight_decay=0.0, validations=1, accumulate=2, keep="last"
    )
    options = {"accelerator": "cpu", "enable_progress_bar": False, **trainer}
    objective = backbone.make_objective(Colors(size=8))
    done = finetune(
        backbone.make_model(),
        {"colors": objective},
        optimizer,
        settings,
        seed=0,
        resume=resume,
        trainer=options,
    )
    return None if done is None else {"state": done.state, "value": done.val_accuracy}


def train_by_a_clock_of_its_own(resume: Path, rank: int) -> list[float]:
    """Checksums of the weights after every step of one rank, whose seconds are longer than the other's."""
    seen: list[float] = []
    ticks = count()
    settings = replace(SETTINGS, budget="seconds", seconds=20.0)
    kept, clock.time = clock.time, SimpleNamespace(monotonic=lambda: (1.0 + 0.7 * rank) * next(ticks))  # type: ignore
    try:
        train("sam", resume, seen, settings=settings, strategy="ddp", devices=2)
    finally:
        clock.time = kept
    return seen


def train_all(folder: str, models: str) -> None:
    """Every optimizer under DDP, some under FSDP2, language models under both; a file a rank."""
    import os

    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in OPTIMIZERS:
        seen: list[float] = []
        done = train(name, Path(folder, "ddp", name), seen, strategy="ddp", devices=2)
        results[f"ddp {name}"] = {"seen": seen, "done": done}
    results["clock"] = train_by_a_clock_of_its_own(Path(folder, "clock"), int(os.environ["RANK"]))
    for name in SHARDED:
        results[f"fsdp {name}"] = {"done": train(name, Path(folder, "fsdp", name), strategy="fsdp", devices=2)}
    for name in RESUMED:
        folder_of_run = Path(folder, "fsdp", f"{name} cut")
        train(name, folder_of_run, cut=5, strategy="fsdp", devices=2)
        results[f"fsdp {name} resumed"] = {"done": train(name, folder_of_run, strategy="fsdp", devices=2)}
    for strategy in ("ddp", "fsdp"):
        for architecture in LANGUAGE:
            folder_of_run = Path(folder, strategy, architecture)
            results[f"{strategy} {architecture}"] = train_language(
                architecture, Path(models), folder_of_run, strategy=strategy, devices=2
            )
    torch.save(results, Path(folder, f"{os.environ['RANK']}.pt"))
