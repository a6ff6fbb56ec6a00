"""The LightningModule: a model that trains by the objectives of its tasks, with any of our optimizers.

Optimizers that evaluate a batch twice call `training_step` twice. What must happen once per step is tied to the
right call: recording the loss to the first, clipping to the gradient that the base uses.
"""

from __future__ import annotations

import logging
import math
from collections import UserList
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim.lr_scheduler import LambdaLR

from mergekit_lab.backbones import Objective
from mergekit_lab.backbones.objective import to_list
from mergekit_lab.batches import count_samples, cut_batch, take_samples
from mergekit_lab.compiled import compile_model, is_worthwhile
from mergekit_lab.cuda_graphs import DEVICES
from mergekit_lab.errors import InputError
from mergekit_lab.optim.capturable import HostSettings, can_keep_on_device, describe_as_before, keep_on_device
from mergekit_lab.optim.wrapper import WrappedOptimizer
from mergekit_lab.training.captured import Batches, Replay
from mergekit_lab.training.clock import NEVER, Clock
from mergekit_lab.training.data import StepBatches, spread_seed
from mergekit_lab.training.recording import OnMetrics, RecordedModule
from mergekit_lab.training.settings import TrainingSettings

log = logging.getLogger(__name__)

_REPLAY_PAYS_FROM = 20
"""Steps from which `training.capture=auto` records: it takes a second or two."""

_VALIDATED = 512
"""Samples at a time in validation."""

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class FinetuneModule(RecordedModule):
    """Trains on the mean loss over all items of a batch, with a learning-rate schedule after linear warm-up.

    Args:
        model: all its parameters that require gradients are trained.
        objectives: by task. Batches come from their training parts.
        make_optimizer: builds the optimizer from named parameters.
        settings: planned settings.
        seed: decides the order of the data. It seeds dropout and other random numbers anew in each step, by
            (seed, step). A resumed run draws the same numbers as an uninterrupted one.
        on_metrics: called with every point of the training curve, `(metrics, step)`.

    Attributes:
        clock: for a budget of seconds, a callback that ends training. It gives the schedule's progress, instead
            of the number of steps.
        replays: whether steps are recorded and replayed; set when optimizers are configured.
    """

    def __init__(
        self,
        model: nn.Module,
        objectives: Mapping[str, Objective],
        make_optimizer: MakeOptimizer,
        settings: TrainingSettings,
        *,
        seed: int = 0,
        on_metrics: OnMetrics | None = None,
    ) -> None:
        super().__init__(list(objectives), settings.steps, on_metrics)
        self.model = model
        self.objectives = dict(objectives)
        self._moved = nn.ModuleList(objectives.values())  # to the device, as the model is
        self.make_optimizer = make_optimizer
        self.settings = settings
        self.seed = seed
        seconds = settings.seconds
        self.clock = None if seconds is None else Clock(seconds, settings.validations)
        self._runs: list[nn.Module] = [model]  # in a list, for a compiled model is no other module
        self._to_compile = False
        self.replays = False
        self._host_settings: HostSettings | None = None
        self._predicted: dict[str, tuple[list[list[Any] | Tensor], list[Tensor]]] = {}

    def configure_model(self) -> None:
        """Shard the weights over processes, inner blocks first, if the strategy has a mesh."""
        if self.device_mesh is None or isinstance(self.model, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for blocks in [m for m in self.model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)][::-1]:
            for block in blocks:
                if any(True for _ in block.parameters()):
                    fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def train_dataloader(self) -> StepBatches:
        return StepBatches(
            self.objectives,
            self.settings.batch_size,
            self.steps if self.clock is None else NEVER,
            self.seed,
            start=self.global_step,
            rank=self.global_rank,
            world=self.trainer.world_size,
            few_shapes=self.replays,
            device=self.trainer.strategy.root_device,
        )

    def val_dataloader(self) -> UserList[dict[str, Tensor]]:
        """All samples of the validation parts once, task after task; a list would be several loaders."""
        sizes = {name: objective.task.count("validation") for name, objective in self.objectives.items()}
        return UserList(
            {task: index} for task, size in sizes.items() for index in torch.arange(size).split(_VALIDATED)
        )

    def configure_optimizers(self) -> Any:
        if self.trainer.accumulate_grad_batches > 1:
            raise InputError(
                "Lightning's accumulate_grad_batches would hide all but the last micro-batch from optimizers "
                "that evaluate twice: set training.accumulate instead"
            )
        if self.trainer.gradient_clip_val is not None:
            raise InputError(
                f"Trainer(gradient_clip_val={self.trainer.gradient_clip_val}) has no effect here: set "
                "training.clip_norm instead"
            )
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        optimizer = self.make_optimizer(named)
        if isinstance(optimizer, WrappedOptimizer):
            optimizer.stays_in_train_mode = False
            optimizer.base.register_step_pre_hook(self._clip)
        self.replays = self._wants_replay(optimizer)
        schedule = LambdaLR(optimizer, self._find_rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _find_rate(self, step: int) -> float:
        done = step if self.clock is None else self.clock.fraction * self.steps
        return compute_rate(done, self.steps, self.settings.warmup, self.settings.schedule)

    def on_train_batch_start(self, batch: Batches, batch_idx: int) -> None:
        seed = (self.seed * 1_000_003 + self.global_step) % (1 << 63)
        if self._to_compile:
            self._to_compile = False
            self._runs = [compile_model(self.model, lambda model: self._try(model, batch), "training.compile")]
        _seed(spread_seed(seed, self.global_rank, self.trainer.world_size), self.device)
        self._first_loss = None

    def _try(self, model: nn.Module, batch: Batches) -> None:
        """Compute gradients of a first micro-batch by a model that may not be able to."""
        self._runs = [model]
        with self.trainer.precision_plugin.forward_context():
            loss = self.compute_loss(self._cut(batch)[0], 1)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        torch.autograd.grad(loss, trained, allow_unused=True)

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Do nothing. Lightning calls this after `training_step`, when gradients of micro-batches already
        exist.
        """

    def training_step(self, batch: Batches, batch_idx: int) -> Tensor:
        """The batch's loss, from which Lightning goes backward. If steps are replayed, a whole step."""
        if self._replay is None:
            return self._evaluate(batch)
        self._first_loss = self._replay(batch)
        return self._first_loss

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        if self._replay is None:
            try:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            except RuntimeError as error:
                if "without overflow" not in str(error):
                    raise
                raise InputError(
                    f"the optimizer of {', '.join(self.tasks)} has settings that overflow float32 "
                    f"({error}): lower its learning rate or weight decay"
                ) from error
        elif optimizer_closure is not None:
            optimizer_closure()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._replay is None:
            super().backward(loss, *args, **kwargs)

    def _update(self, batch: Batches) -> Tensor:
        """One whole step without Lightning: forward, backward, clip, optimizer; its first loss."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self._first_loss = None

        def closure() -> Tensor:
            with self.trainer.precision_plugin.forward_context():
                loss = self._evaluate(batch)
            loss.backward()
            if not isinstance(optimizer, WrappedOptimizer):
                self._clip()
            return loss

        with torch.autocast(self.device.type, enabled=False):
            optimizer.step(closure)
        assert self._first_loss is not None
        self._watch(self._first_loss)
        return self._first_loss

    def _evaluate(self, batch: Batches) -> Tensor:
        """The loss of the whole batch; its gradient is that of the last micro-batch, the others' are added."""
        self.optimizers(use_pl_optimizer=False).zero_grad()  # type: ignore[union-attr]
        batch = self._take_share(batch)
        total = self._count_items(batch)
        *others, last = self._cut(batch)
        before = torch.zeros((), device=self.device)
        for part in others:
            loss = self.compute_loss(part, total)
            with torch.autocast(self.device.type, enabled=False):
                loss.backward()
            before = before + loss.detach()
        loss = self.compute_loss(last, total)
        if others:
            loss = loss + before
        if self._first_loss is None:
            self._first_loss = loss.detach()
        return loss

    def _count_items(self, batch: Batches) -> int | Tensor:
        """What losses are divided by: the mean over processes, for gradients will be averaged over them."""
        total = sum(self.objectives[task].count_items(part) for task, part in batch.items())
        if self.trainer.world_size == 1:
            return total
        shared = torch.as_tensor(total, dtype=torch.float32, device=self.device)
        return self.trainer.strategy.reduce(shared, reduce_op="mean")

    def _cut(self, batch: Batches) -> list[Batches]:
        """The batch in up to `accumulate` parts."""
        parts: list[Batches] = [{} for _ in range(self.settings.accumulate)]
        for task, whole in batch.items():
            size = -(-count_samples(whole) // self.settings.accumulate)
            for own, part in zip(parts, cut_batch(whole, size), strict=False):
                own[task] = part
        return [part for part in parts if part]

    def compute_loss(self, batch: Batches, total: int | Tensor) -> Tensor:
        losses = [
            self.objectives[task].compute_loss(
                self._runs[0], part, label_smoothing=self.settings.label_smoothing
            )
            / total
            for task, part in batch.items()
        ]
        return torch.stack(losses).sum()

    def _take_share(self, batch: Batches) -> Batches:
        """The part of the batch that the optimizer asks for: all of it, but in a cheaper ascent."""
        share = getattr(self.optimizers(use_pl_optimizer=False), "batch_fraction", 1.0)
        if share >= 1:
            return batch
        counts = {task: max(1, round(share * count_samples(whole))) for task, whole in batch.items()}
        return {task: take_samples(batch[task], 0, count) for task, count in counts.items()}

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if not isinstance(optimizer, WrappedOptimizer):
            self._clip()

    def _clip(self, *_: Any) -> None:
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)

    def on_train_start(self) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        if isinstance(optimizer, WrappedOptimizer):
            model = self.trainer.strategy.model
            optimizer.attach(self if model is None else model)
        self._first_bad = torch.full((), -1, device=self.device)
        self._done = torch.full((), self.global_step, device=self.device)
        self._to_compile = self._wants_compiled()
        if self.replays:
            wrapped = isinstance(optimizer, WrappedOptimizer)
            self._host_settings = keep_on_device(optimizer.base if wrapped else optimizer, self.device)
            if wrapped:
                optimizer.allow_replay(self.device)
            self._replay = Replay(self._update, optimizer, self.device)

    def _wants_compiled(self) -> bool:
        if self.device_mesh is not None:
            if self.settings.compile is True:
                log.warning("training.compile: a model that is spread over processes runs as written")
            return False
        if self.settings.compile == "auto":
            return is_worthwhile(self.device, self.steps, self.model)
        return bool(self.settings.compile)

    def _wants_replay(self, optimizer: Any) -> bool:
        """Whether steps are to be replayed; if they cannot be, a line of the log says why."""
        pays = self.clock is not None or self.steps >= _REPLAY_PAYS_FROM
        on_card = self.device.type in DEVICES
        if not self.settings.capture or (self.settings.capture == "auto" and not (on_card and pays)):
            return False
        why = self._refuse_replay(optimizer)
        if why:
            log.info("training.capture: steps run as written, for %s", why)
        return not why

    def _refuse_replay(self, optimizer: Any) -> str:
        if self.device.type not in DEVICES:
            return f"a {self.device.type} has no CUDA graphs"
        if self.trainer.world_size > 1:
            return "several processes train together"
        if odd := [task for task in self.tasks if not self.objectives[task].fixes_shapes]:
            return f"batches of {', '.join(odd)} have many shapes"
        wrapped = isinstance(optimizer, WrappedOptimizer)
        if wrapped and not optimizer.replayable:
            return f"{type(optimizer).__name__} decides on the host what to compute"
        base = optimizer.base if wrapped else optimizer
        return "" if can_keep_on_device(base, self.device) else f"{type(base).__name__} reads the host"

    def forget_graphs(self) -> None:
        """Free recorded steps and the compiled model after training."""
        self._replay = None
        self._runs = [self.model]

    def on_train_batch_end(self, outputs: Any, batch: Batches, batch_idx: int) -> None:
        self.end_step()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for task, index in batch.items():
            predictions, indices = self._predicted.setdefault(task, ([], []))
            indices.append(index.cpu())
            predictions.append(self.objectives[task].predict(self.model, "validation", indices[-1]))

    def on_validation_epoch_end(self) -> None:
        values = []
        for task, (predictions, indices) in self._predicted.items():
            objective = self.objectives[task]
            answers = [answer for some in predictions for answer in to_list(some)]
            values.append(objective.measure(answers, "validation", torch.cat(indices))[objective.task.metric])
        self._predicted = {}
        mean = sum(values) / len(values)
        self.log("val_accuracy", mean, logger=False, sync_dist=self.trainer.world_size > 1)
        if not self.trainer.sanity_checking:
            self._record({"val_accuracy": mean}, self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._record_points(wait=True)
        checkpoint["curve"] = [dict(point) for point in self.curve]
        if self._host_settings is not None:
            for state in checkpoint["optimizer_states"]:
                describe_as_before(state, self._host_settings)
        self._saved = self.global_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.curve = [dict(point) for point in checkpoint["curve"]]
        self._saved = checkpoint["global_step"]


def compute_rate(step: float, steps: int, warmup_steps: int, schedule: str = "cosine") -> float:
    """The factor on the learning rate: linear from 0 to 1 over the warm-up, then by the schedule."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    if schedule == "constant":
        return 1.0
    return 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def _seed(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for the CPU and this device.

    That one also leaves a note, with a trace of the stack, for every kind of accelerator that is not in use:
    in each step it costs as much as a small model's forward pass.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
