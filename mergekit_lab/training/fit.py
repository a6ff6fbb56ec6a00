"""One fine-tuning, from its start or a checkpoint, to the weights that are kept."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from mergekit_lab.backbones import Objective
from mergekit_lab.errors import InputError
from mergekit_lab.optim.wrapper import WrappedOptimizer
from mergekit_lab.training.clock import NEVER
from mergekit_lab.training.module import FinetuneModule, MakeOptimizer
from mergekit_lab.training.recording import OnMetrics
from mergekit_lab.training.resume import SealedCheckpoints
from mergekit_lab.training.settings import TrainingSettings
from mergekit_lab.training.sharded import Sharded
from mergekit_lab.training.stopper import Stopped, Stopper


@dataclass(frozen=True)
class Finetuned:
    """The result of a fine-tuning.

    Attributes:
        state: the trained state dict, on the CPU.
        curve: points `{"step", "train_loss", "lr", "val_accuracy"}`; the last three only if measured.
        val_accuracy: the tasks' metric of `state` on validation, mean over tasks, at most 1.
        step: the step that `state` was taken after.
    """

    state: dict[str, Tensor]
    curve: list[dict[str, float]]
    val_accuracy: float
    step: int


def finetune(
    model: nn.Module,
    objectives: Mapping[str, Objective],
    make_optimizer: MakeOptimizer,
    settings: TrainingSettings,
    *,
    seed: int,
    resume: Path,
    identity: str = "",
    callbacks: Sequence[Callback] = (),
    trainer: Mapping[str, Any] | None = None,
    on_metrics: OnMetrics | None = None,
) -> Finetuned | None:
    """Train `model` in place and return the weights to keep. With several processes, all but the first return
    None.

    Args:
        model: the pretrained model. Parameters that require a gradient train. Under "32-true" and "bf16-mixed",
            16-bit weights become float32, because small steps and offsets would be lost in rounding.
        objectives: by task.
        make_optimizer: builds the optimizer from named parameters.
        settings: planned settings: their budget is of steps or seconds. See `TrainingSettings.plan`.
        seed: decides the order of the data and dropout.
        resume: a folder for checkpoints. If it holds this training's `last.ckpt`, training resumes from it.
        identity: what is made, such as an artifact's key. A checkpoint with another identity or other initial
            weights is reported and ignored.
        callbacks: more callbacks of Lightning.
        trainer: more arguments of `lightning.Trainer` (accelerator, devices, strategy). With the strategy "ddp"
            or "fsdp" and n devices, n processes call this together, with `LOCAL_RANK` and its kin set.
        on_metrics: called with every point of the curve.
    """
    module = FinetuneModule(model, objectives, make_optimizer, settings, seed=seed, on_metrics=on_metrics)
    best = None
    if settings.keep == "best":
        best = _Kept(resume, filename="best", monitor="val_accuracy", mode="max", enable_version_counter=False)
    latest = _Latest(resume, filename="last", enable_version_counter=False)
    end = _End(best)
    stopper = Stopper(resume / "last.ckpt")
    own = [each for each in (module.clock, best, latest, stopper, end) if each is not None]
    checkpoints = SealedCheckpoints(identity, model.state_dict())
    resumed = checkpoints.find_last(resume)
    lit = _make_trainer(settings, resume, [*own, *callbacks], [checkpoints], dict(trainer or {}))
    if settings.precision in ("32-true", "bf16-mixed"):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype in (torch.bfloat16, torch.float16):
                tensor.data = tensor.data.float()
    model.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")  # Lightning with torch ≥ 2.13
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        try:
            with stopper.listen():
                lit.fit(module, ckpt_path=resumed, weights_only=True)
        except (Stopped, SystemExit):  # the latter is what Lightning makes of a KeyboardInterrupt
            raise KeyboardInterrupt from None
        finally:
            module.forget_graphs()
    lit.strategy.barrier()
    if not lit.is_global_zero:
        return None
    saved, step = end.state, end.step
    if saved is None:  # an earlier step's are the best, or the training had already ended
        file = resume / "last.ckpt" if best is None else best.best_model_path
        loaded = torch.load(file, weights_only=True, map_location="cpu")
        saved, step = loaded["state_dict"], int(loaded["global_step"])
    state = {name.removeprefix("model."): tensor for name, tensor in saved.items()}
    at_step = (point for point in reversed(module.curve) if point["step"] == step)
    accuracy = next((point["val_accuracy"] for point in at_step if "val_accuracy" in point), 0.0)
    return Finetuned(state, module.curve, accuracy, step)


def _make_trainer(
    settings: TrainingSettings, folder: Path, callbacks: list[Any], plugins: list[Any], options: dict[str, Any]
) -> lightning.Trainer:
    """Lightning's trainer, whose budget is of steps, or of seconds where a clock is among the callbacks."""
    clocked = settings.seconds is not None
    if options.setdefault("enable_progress_bar", True):
        callbacks = [*callbacks, Progress()]
    if options.get("strategy") == "fsdp":
        options["strategy"] = Sharded(options["devices"])
    try:
        return lightning.Trainer(
            **options,
            plugins=[LightningEnvironment(), *plugins],
            max_steps=-1 if clocked else settings.steps,
            max_epochs=-1,
            precision=settings.precision,  # type: ignore[arg-type]
            val_check_interval=NEVER if clocked else settings.validate_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            logger=False,
            callbacks=callbacks,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
    except MisconfigurationException as error:
        raise InputError(f"training cannot start: {error}") from None


class _Latest(ModelCheckpoint):
    """Writes `last.ckpt` after every validation except the last, after which there is nothing to resume.

    It finds its files again if their folder was moved, or has another path now.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        def find_here(file: str) -> str:
            return str(Path(self.dirpath or "", Path(file).name)) if file else ""

        moved = {name: find_here(state_dict[name]) for name in ("best_model_path", "kth_best_model_path")}
        best = {find_here(file): score for file, score in state_dict["best_k_models"].items()}
        super().load_state_dict(state_dict | moved | {"best_k_models": best, "dirpath": self.dirpath})

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if not trainer.should_stop and not 0 <= trainer.max_steps <= trainer.global_step:
            super().on_validation_end(trainer, pl_module)


class _Kept(_Latest):
    """Writes `best.ckpt` after every validation except the last, whose weights `_End` takes from memory."""


class _End(Callback):
    """Takes the final weights if they are to be kept, and frees memory.

    It takes them while all processes that hold parts of them still run. Then it frees graphs, gradients,
    moments and copies of weights, before Lightning would move them to the host. If it took the weights, it
    frees those on the device too.

    Freeing is necessary because Lightning's objects refer to each other in cycles. They live until Python's
    collector finds them, and the next training of a run would find their memory in use.

    Args:
        best: knows the best score so far. With None the final weights are always kept.

    Attributes:
        state: the module's whole state dict on the CPU; None if it was not taken.
        step: the step after which it was taken.
    """

    state: dict[str, Tensor] | None = None
    step = 0

    def __init__(self, best: ModelCheckpoint | None) -> None:
        self._best = best

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        score = trainer.callback_metrics.get("val_accuracy")
        if self._best is not None and not self._best.check_monitor_top_k(trainer, score):
            return
        state = trainer.strategy.lightning_module_state_dict()
        on_host = trainer.strategy.root_device.type == "cpu"  # where an optimizer may still write into them
        self.state = {name: tensor.detach().to("cpu", copy=on_host) for name, tensor in state.items()}
        self.step = trainer.global_step

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        pl_module.forget_graphs()
        pl_module.zero_grad(set_to_none=True)
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, WrappedOptimizer):
                optimizer.release()
            else:
                optimizer.state.clear()
        if self.state is not None and isinstance(trainer.strategy, SingleDeviceStrategy):
            parameters = dict(pl_module.named_parameters())
            for name in parameters.keys() & self.state.keys():  # a state dict may have its own names
                parameters[name].data = self.state[name]


class Progress(RichProgressBar):
    """Counts steps of the whole training, also of a resumed one, and shows the last recorded loss.

    A clock does not know the last step, and a run has only one epoch.
    """

    @property
    def total_train_batches(self) -> float:
        return float("inf") if self.trainer.max_steps < 0 else self.trainer.max_steps

    def get_metrics(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> dict[str, Any]:
        curve = pl_module.curve if isinstance(pl_module, FinetuneModule) else []
        loss = next((point["train_loss"] for point in reversed(curve) if "train_loss" in point), None)
        return {} if loss is None else {"loss": f"{loss:.3f}"}

    def _get_train_description(self, current_epoch: int) -> str:
        return f"{'Training':{len(self.validation_description)}}"
