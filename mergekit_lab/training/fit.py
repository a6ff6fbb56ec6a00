"""One fine-tuning from start, or from where it was cut, to the weights that are kept."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from torch import Tensor, nn

from mergekit_lab.errors import InputError
from mergekit_lab.tasks import Split
from mergekit_lab.training.data import TaskData
from mergekit_lab.training.module import FinetuneModule, MakeOptimizer, OnMetrics

log = logging.getLogger(__name__)

_KEEP = ("best", "last")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides a fine-tuning, beside the optimizer, the data and the backbone.

    Args:
        steps: optimizer steps, at least 1.
        batch_size: images a step.
        lr, weight_decay: for the optimizers, whose configurations refer to them.
        warmup_steps: linear warm-up, at most `steps`.
        clip_norm: largest gradient norm, or None.
        label_smoothing: in [0, 1).
        precision: Lightning's name: "32-true" or "bf16-mixed". fp16 scaling cannot step with a closure.
        validations: how often validation runs; lowered to the next number that divides `steps`.
        keep: the weights that are kept: "best" on validation, or "last".
    """

    steps: int
    batch_size: int
    lr: float
    weight_decay: float
    warmup_steps: int = 0
    clip_norm: float | None = 1.0
    label_smoothing: float = 0.0
    precision: str = "32-true"
    validations: int = 5
    keep: str = "best"

    def __post_init__(self) -> None:
        for name, low in {"steps": 1, "batch_size": 1, "lr": 0, "weight_decay": 0, "validations": 1}.items():
            if not low <= getattr(self, name) < math.inf:
                raise InputError(
                    f"training.{name} is {getattr(self, name)}; it must be at least {low}, and finite"
                )
        if not 0 <= self.warmup_steps <= self.steps:
            raise InputError(
                f"training.warmup_steps is {self.warmup_steps}; "
                f"it must be in [0, training.steps = {self.steps}]"
            )
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"training.label_smoothing is {self.label_smoothing}; it must be in [0, 1)")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise InputError(f"training.clip_norm is {self.clip_norm}; it must be positive, or null")
        if self.keep not in _KEEP:
            raise InputError(f"training.keep is {self.keep!r}; it must be one of {', '.join(_KEEP)}")
        if self.precision not in ("32-true", "bf16-mixed", "64-true"):
            raise InputError(
                f"training.precision is {self.precision!r}; it must be 32-true, bf16-mixed or 64-true: fp16 "
                "gradient scaling steps without a closure, which SAM and its kin need"
            )

    @property
    def validate_every(self) -> int:
        """Steps between validations; the last is after the last step."""
        return next(
            self.steps // n for n in range(min(self.validations, self.steps), 0, -1) if self.steps % n == 0
        )


@dataclass(frozen=True)
class Finetuned:
    """What a fine-tuning gives.

    Attributes:
        state: the encoder's state dict, on the CPU.
        curve: points `{"step", "train_loss", "lr", "val_accuracy"}`, the last three where measured.
        val_accuracy: of `state`, in [0, 1], mean over tasks.
        step: at which `state` was taken.
    """

    state: dict[str, Tensor]
    curve: list[dict[str, float]]
    val_accuracy: float
    step: int


def finetune(
    encoder: nn.Module,
    heads: Mapping[str, Tensor],
    train: Mapping[str, Split],
    validation: Mapping[str, Split],
    make_optimizer: MakeOptimizer,
    settings: Settings,
    *,
    seed: int,
    resume: Path,
    trainer: Mapping[str, Any] | None = None,
    on_metrics: OnMetrics | None = None,
) -> Finetuned:
    """Train `encoder` in place and return the weights to keep.

    Args:
        encoder: as pretrained.
        heads, train, validation: by task name.
        make_optimizer: builds the optimizer from named parameters.
        settings: see `Settings`.
        seed: of the order of the data and of dropout.
        resume: a folder for checkpoints. If it holds `last.ckpt` of a run that was cut, that run goes on.
        trainer: further arguments of `lightning.Trainer` (accelerator, devices).
        on_metrics: called with every point of the curve.
    """
    module = FinetuneModule(
        encoder,
        heads,
        make_optimizer,
        steps=settings.steps,
        warmup_steps=settings.warmup_steps,
        clip_norm=settings.clip_norm,
        label_smoothing=settings.label_smoothing,
        seed=seed,
        record_every=max(1, settings.steps // 50),
        on_metrics=on_metrics,
    )
    data = TaskData(train, validation, batch_size=settings.batch_size, steps=settings.steps, seed=seed)
    best = ModelCheckpoint(
        resume,
        filename="best",
        monitor="val_accuracy",
        mode="max",
        enable_version_counter=False,
    )
    latest = ModelCheckpoint(resume, filename="last", enable_version_counter=False)
    options: dict[str, Any] = {"enable_progress_bar": True} | dict(trainer or {})
    callbacks: list[Any] = [best, latest]
    if options["enable_progress_bar"]:
        callbacks.append(RichProgressBar(leave=False))
    try:
        lit = lightning.Trainer(
            **options,
            max_steps=settings.steps,
            precision=settings.precision,  # type: ignore[arg-type]
            val_check_interval=settings.validate_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            logger=False,
            callbacks=callbacks,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=resume,
        )
    except MisconfigurationException as error:
        raise InputError(f"training cannot start: {error}") from None
    last = resume / "last.ckpt"
    if last.exists():
        log.info("resuming from %s", last)
    encoder.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")  # Lightning with torch ≥ 2.13
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        lit.fit(module, data, ckpt_path=last if last.exists() else None, weights_only=True)
    if lit.interrupted:
        raise KeyboardInterrupt
    kept = torch.load(
        best.best_model_path if settings.keep == "best" else last, weights_only=True, map_location="cpu"
    )
    state = {n.removeprefix("encoder."): v for n, v in kept["state_dict"].items() if n.startswith("encoder.")}
    step = int(kept["global_step"])
    accuracy = next(
        (p["val_accuracy"] for p in reversed(module.curve) if p["step"] == step and "val_accuracy" in p), 0.0
    )
    return Finetuned(state, module.curve, accuracy, step)
