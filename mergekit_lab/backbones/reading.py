"""Settings of how a language model reads a text task and answers. Nothing here reads a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from mergekit_lab.ranges import check_settings
from mergekit_lab.tasks import TextTask

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a model reads a text task and answers.

    Args:
        prompt: "chat" formats the prompt as a user's message by the tokenizer's chat template; "plain" leaves
            it unchanged.
        max_length: tokens of prompt and answer together, at least 8. Longer ones are cut and counted: answers
            at their end to half of it, then prompts inside their template.
        cut: which end of a long prompt is cut, "start" or "end".
        loss_on: "answer", or "all" to include the prompt's tokens (decoder-only models).
        group_by_length: make training batches of samples of similar length.
        packing: put several samples into a training row of up to `max_length` tokens (decoder-only models). A
            sample sees only itself, so the loss is the same with less padding. It gains little if lengths are
            similar, also by `group_by_length`.
        answering: "choices" takes the likeliest of a task's choices, "generate" decodes greedily. "auto" takes
            "choices" if the task has some.
        precision: arithmetic of evaluation, "bfloat16" by autocast or "float32". Weights stored in bfloat16
            always compute in it. `training.precision` sets that of training.

    Raises:
        InputError: a value out of range.
    """

    prompt: Literal["chat", "plain"] = "chat"
    max_length: Annotated[int, Ge(8)] = 1024
    cut: Literal["start", "end"] = "start"
    loss_on: Literal["answer", "all"] = "answer"
    group_by_length: bool = True
    packing: bool = False
    answering: Literal["auto", "choices", "generate"] = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self), "backbone.{}")

    def chooses(self, task: TextTask) -> bool:
        """Whether answers are chosen from the task's choices."""
        return self.answering == "choices" or (self.answering == "auto" and task.choices is not None)
