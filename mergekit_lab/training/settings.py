"""Settings of a fine-tuning besides optimizer, data and backbone, such as its budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt

from mergekit_lab.errors import InputError
from mergekit_lab.ranges import Count, NotNegative, Rate, check_settings, require

_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")
_HOW = ("compile", "capture")
"""What decides how fast a training is, and of its result no more than the card does: the rounding."""
_BUDGETS = ("gradient_evaluations", "seconds")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of a fine-tuning besides optimizer, data and backbone.

    Args:
        steps: optimizer steps, at least 1.
        batch_size: samples per step, at least 1.
        lr, weight_decay: values that the optimizers' configurations refer to; `lr` in [0, 1e30].
        budget: the unit in which optimizers spend equally: "steps"; "gradient_evaluations" of a whole batch, of
            which SAM takes two per step; or "seconds" of training without validation.
        gradient_evaluations: that budget's size; None takes the number of `steps`, or of the epochs' steps.
        seconds: that budget's size, positive. `steps` then only says what share `warmup_steps` is.
        warmup_steps: length of the linear warm-up: a share of the steps as a float in [0, 1], or a whole
            number, at most `steps`. Every budget warms up for the same share. The joint model's warm-up is an
            expert's.
        epochs: passes over a task's training part, instead of `steps`. `steps` then only says what share
            `warmup_steps` is.
        epochs_of: epochs of single tasks, by name.
        schedule: the learning rate after the warm-up: "cosine" or "linear" to 0, or "constant".
        accumulate: micro-batches per batch, at least 1. The gradient is the whole batch's, in the memory of a
            micro-batch. Every evaluation, an ascent too, goes over all of them.
        clip_norm: largest gradient norm, positive, or None.
        label_smoothing: in [0, 1).
        precision: Lightning's name: "32-true"; "bf16-mixed", float32 weights with bfloat16 arithmetic; or
            "bf16-true", bfloat16 weights. float16 is not offered: its loss scaling cannot step with a closure.
        validations: how often validation runs; lowered to the next number that divides `steps`.
        keep: which weights to keep: the "best" on validation, or the "last".
        compile: whether `torch.compile` compiles the model. It takes 30 to 80 s, once for models of one shape.
            "auto" compiles on a CUDA device from 5,000 steps of a model of 10 million parameters on.
        capture: whether whole steps are recorded in CUDA graphs and replayed. Recording takes seconds. "auto"
            records on a CUDA device from 20 steps on. Steps that cannot be recorded run without graphs, and the
            log says why.

    Raises:
        InputError: a value is out of range, or the size of another budget than the chosen one is set.
    """

    steps: Count
    batch_size: Count
    lr: NotNegative
    weight_decay: NotNegative
    budget: Literal["steps", "gradient_evaluations", "seconds"] = "steps"
    gradient_evaluations: Count | None = None
    seconds: Rate | None = None
    warmup_steps: int | float = 0
    epochs: Rate | None = None
    epochs_of: dict[str, Rate] | None = None
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    accumulate: Count = 1
    clip_norm: Rate | None = 1.0
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    precision: str = "32-true"
    validations: Count = 5
    keep: Literal["best", "last"] = "best"
    compile: bool | Literal["auto"] = "auto"
    capture: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check_settings(TrainingSettings, vars(self), "training.{}")
        most = f"at most training.batch_size = {self.batch_size}, which it cuts into micro-batches"
        require(self.accumulate <= self.batch_size, "training.accumulate", self.accumulate, most)
        whole = 1 if isinstance(self.warmup_steps, float) else self.steps
        rule = f"a share, 0.0 to 1.0, or a whole number in [0, training.steps = {self.steps}]"
        require(0 <= self.warmup_steps <= whole, "training.warmup_steps", self.warmup_steps, rule)
        self._check_budget()
        rule = f"one of {', '.join(_PRECISIONS)}: no fp16, whose gradient scaler steps without a closure"
        require(self.precision in _PRECISIONS, "training.precision", self.precision, rule)
        self._check_epochs()

    def _check_epochs(self) -> None:
        epochs = [name for name in ("epochs", "epochs_of") if getattr(self, name)]
        size = next((name for name in _BUDGETS if getattr(self, name) is not None), None)
        if epochs and size:
            raise InputError(
                f"training.{epochs[0]} and training.{size} both say how long: leave one of them null"
            )

    def _check_budget(self) -> None:
        for name in _BUDGETS:
            value = getattr(self, name)
            if value is not None and self.budget != name:
                raise InputError(
                    f"training.{name} is {value}, and training.budget is {self.budget!r}: set "
                    f"training.budget={name}, or leave training.{name} null"
                )
        if self.budget == "seconds" and self.seconds is None:
            raise InputError("training.budget=seconds needs training.seconds, the time to train one expert")

    def resolve_epochs(self, task: str, samples: int) -> TrainingSettings:
        """These settings with epochs as a whole number of steps, at least 1.

        Args:
            samples: size of the task's training part.
        """
        epochs = (self.epochs_of or {}).get(task, self.epochs)
        steps = self.steps if epochs is None else max(1, round(epochs * samples / self.batch_size))
        return replace(self.with_steps(steps), epochs=None, epochs_of=None)

    @property
    def warmup(self) -> int:
        """The number of warm-up steps. A share is rounded down."""
        share = isinstance(self.warmup_steps, float)
        return math.floor(self.warmup_steps * self.steps + 1e-9) if share else int(self.warmup_steps)

    def with_steps(self, steps: int) -> TrainingSettings:
        """These settings for another number of steps, with the same share of warm-up."""
        whole = (
            self.warmup_steps
            if isinstance(self.warmup_steps, float)
            else self.warmup_steps * steps // self.steps
        )
        return replace(self, steps=steps, warmup_steps=whole)

    def describe_content(self) -> dict[str, Any]:
        """The part of planned settings that enters keys. Settings of speed are left out, and so are defaults of
        settings that are newer than existing keys.
        """
        unsaid = {"epochs": None, "epochs_of": None, "schedule": "cosine"}
        content = {name: value for name, value in asdict(self).items() if name not in _HOW}
        content["warmup_steps"] = self.warmup
        return {name: value for name, value in content.items() if (name, value) not in unsaid.items()}

    def plan(self, evaluations_a_step: Fraction) -> TrainingSettings:
        """These settings with a budget of gradient evaluations as the number of whole steps that it allows.

        Args:
            evaluations_a_step: the optimizer's cost, from `optim.gradient_evaluations`.

        Raises:
            InputError: the budget does not allow one step.
        """
        if self.budget != "gradient_evaluations":
            return self
        allowed = self.steps if self.gradient_evaluations is None else self.gradient_evaluations
        steps = int(allowed / evaluations_a_step)
        if steps < 1:
            raise InputError(
                f"{allowed} gradient evaluations are too few for one step, which takes "
                f"{float(evaluations_a_step):g}: raise training.gradient_evaluations"
            )
        return replace(self.with_steps(steps), budget="steps", gradient_evaluations=None)

    @staticmethod
    def combine(settings: Sequence[TrainingSettings]) -> TrainingSettings:
        """Join planned settings of several models to one model's with their whole budget."""
        first = settings[0]
        seconds = None if first.seconds is None else first.seconds * len(settings)
        steps = sum(each.steps for each in settings)
        return replace(first, steps=steps, warmup_steps=first.warmup, seconds=seconds)

    @property
    def validate_every(self) -> int:
        """Steps between validations. The last validation follows the last step."""
        return next(
            self.steps // n for n in range(min(self.validations, self.steps), 0, -1) if self.steps % n == 0
        )


def describe_machine(accelerator: str) -> str:
    """The machine that a budget of seconds depends on: the GPU's name, or "cpu" and its threads."""
    if accelerator != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu, {torch.get_num_threads()} threads"
