"""One training of a run, in this process or in several together."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from omegaconf import DictConfig

from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.memory import fit_memory
from mergekit_lab.runs.run import MODEL, Run
from mergekit_lab.schema.run import make_optimizer_factory
from mergekit_lab.store import Workspace
from mergekit_lab.training import TrainingSettings
from mergekit_lab.workers import import_ahead, run_together

log = logging.getLogger(__name__)
logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)

CURVE = "curve.json"
"""The file of the training curve, in the artifact of a training."""


IMPORTS = ("mergekit_lab.runs.finetune", "mergekit_lab.training.fit")
"""Modules that a training process imports, Lightning among them."""


@dataclass(frozen=True)
class Training:
    """How a model of a run is trained.

    Attributes:
        title: its name in the log.
        tasks: the tasks that it learns.
        optimizer: the optimizer's configuration.
        settings: planned settings.
        fit: `loc` and `scale` of fitted offsets; None if offsets are not fitted.
    """

    run: Run
    title: str
    tasks: Sequence[str]
    optimizer: DictConfig
    settings: TrainingSettings
    fit: Mapping[str, float] | None = None

    def make(self, workspace: Workspace) -> Mapping[str, Any]:
        """Train in this process, or in as many as the run's strategy asks for."""
        run, settings = self.run, self.settings
        budget = f"{settings.steps} steps" if settings.seconds is None else f"{settings.seconds:g} seconds"
        if run.trainer.strategy == "auto":
            log.info("%s: training %s", self.title, budget)
            return self.train(workspace)
        devices = (run.devices * run.processes)[: run.processes]
        log.info("%s: training %s in %d processes (%s)", self.title, budget, len(devices), run.trainer.strategy)
        import_ahead(IMPORTS)
        return run_together(Training.train, (self, workspace), devices)

    def train(self, workspace: Workspace) -> Mapping[str, Any]:
        """Train in this process. If processes train together, each calls this, and the first writes the result.

        If memory runs out, the micro-batches are halved, and training continues from its last checkpoint. The
        gradient is still that of the whole batch.

        Raises:
            InputError: one sample at a time does not fit.
        """
        info, _ = fit_memory(
            lambda accumulate: self._train(workspace, replace(self.settings, accumulate=accumulate)),
            self.settings.accumulate,
            what=f"training on {', '.join(self.tasks)}",
            setting="training.accumulate",
            way_out="raise it, lower training.batch_size, or set trainer=fsdp or training.precision=bf16-mixed",
            smaller=self._cut_finer,
        )
        return info

    def _cut_finer(self, accumulate: int) -> int | None:
        """Twice as many micro-batches; None if a batch cannot be cut further, or several processes share it."""
        if self.run.trainer.strategy != "auto" or accumulate >= self.settings.batch_size:
            return None
        return min(2 * accumulate, self.settings.batch_size)

    def _train(self, workspace: Workspace, settings: TrainingSettings) -> Mapping[str, Any]:
        from mergekit_lab.training import TrainingCost, finetune

        run = self.run
        prefix = self.tasks[0] if len(self.tasks) == 1 else "joint"
        pretrained = run.backbone.make_model()
        dtypes = {name: tensor.dtype for name, tensor in pretrained.state_dict().items()}
        model = run.parametrization.make_trainable(pretrained, run.seed)
        cost = TrainingCost()
        done = finetune(
            model,
            {task: run.make_objective(task) for task in self.tasks},
            make_optimizer_factory(self.optimizer, settings.steps, self.fit),
            settings,
            seed=run.seed,
            resume=workspace.resume,
            identity=workspace.resume.parent.name,
            callbacks=[cost],
            trainer=self._collect_arguments() | {"enable_progress_bar": run.cfg.progress},
            on_metrics=lambda metrics, step: run.tracker.log(
                {f"{prefix}/{name}": value for name, value in metrics.items()}, step
            ),
        )
        if done is None:
            return {}
        model = run.parametrization.make_trainable(run.backbone.make_model(), run.seed)
        model.load_state_dict(done.state)
        state = {n: t.to(dtypes[n]) for n, t in run.parametrization.fold(model).items()}
        write_tensors(workspace.out / MODEL, state, sync=False)
        (workspace.out / CURVE).write_text(json.dumps(done.curve))
        info = {"val_accuracy": done.val_accuracy, "step": done.step, "accumulate": settings.accumulate}
        return info | cost.measured

    def _collect_arguments(self) -> dict[str, Any]:
        """Arguments of `lightning.Trainer`. A process that trains alone trains on the run's device."""
        run = self.run
        devices: int | list[int] = run.processes
        if run.trainer.strategy == "auto":
            on_card = run.trainer.accelerator != "cpu" and run.device.type == "cuda"
            devices = [run.device.index] if on_card else 1
        shared = {name: value for name, value in asdict(run.trainer).items() if name != "processes"}
        return shared | {"devices": devices}
